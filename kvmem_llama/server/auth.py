"""API keys: who may ask, and whose a workspace is."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import unicodedata
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers

from ..errors import InvalidName, InvalidOption

_BEARER: Final = "Bearer "
_OWNED: Final = re.compile(r"key-([0-9a-f]{24})/(.+)", re.DOTALL)
_PATH: Final = re.compile(r"(^|/)\s*\.{1,2}\s*(/|$)|^\s*(/|~(/|$))|\\|^[A-Za-z]:")
_SLASHES: Final = str.maketrans("\u2044\u2215\u29f8\u2216\u29f5\u29f9", "///\\\\\\")
"""Characters that look like slashes and are not made to be some by Unicode's own tables."""


class Keys:
    """The keys of a server; without any, everybody may ask."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys: Final = tuple(key.encode() for key in keys)

    @property
    def are_needed(self) -> bool:
        return bool(self._keys)

    def owner(self, headers: Headers) -> str | None:
        """Whose request this is: "" where no key is needed; None: it has none, or a wrong one.

        All keys are compared, each in constant time: the answer's time tells nothing about them.
        """
        if not self._keys:
            return ""
        given = headers.get("authorization") or headers.get("x-api-key") or ""
        data = given.removeprefix(_BEARER).encode("latin-1")  # the bytes that were sent
        found = [hmac.compare_digest(data, key) for key in self._keys]
        return owner_of(self._keys[found.index(True)]) if any(found) else None


def owner_of(key: bytes) -> str:
    """24 hexadecimal digits that stand for a key and do not tell it."""
    return hashlib.sha256(b"owner of a workspace of kvmem_llama\0" + key).hexdigest()[:24]


def stored_name(owner: str, name: str) -> str:
    """The name in the store of the workspace that `owner` calls `name`.

    It begins with the owner, so that it survives restarts, forks and renames, and so that two owners may use
    the same name. Raises InvalidName for one that would be another owner's.
    """
    name = unicodedata.normalize("NFC", name)  # as the store has it
    if owner:
        return f"key-{owner}/{name}"
    if _OWNED.fullmatch(name):
        raise InvalidName(name, "names that begin so belong to API keys")
    return name


def new_name(owner: str, name: str) -> str:
    """`stored_name` of a workspace that may have to be made.

    No name ever becomes a path here, but whoever exports workspaces may make files of their names: what looks
    like a path is refused. Raises InvalidName.
    """
    if _PATH.search(as_seen(name)):
        raise InvalidName(name, "it looks like a path")
    return stored_name(owner, name)


def as_seen(name: str) -> str:
    """`name` with plain characters in place of those that look like dots and slashes."""
    return unicodedata.normalize("NFKC", name).translate(_SLASHES)


def shown_name(owner: str, stored: str) -> str | None:
    """What `owner` calls the workspace with this name in the store; None: it is another owner's."""
    stored_owner, name = split_name(stored)
    return name if stored_owner == owner else None


def split_name(stored: str) -> tuple[str, str]:
    """Owner of the workspace with this name in the store, "" for none, and what the owner calls it."""
    owned = _OWNED.fullmatch(stored)
    return ("", stored) if owned is None else (owned[1], owned[2])


def check_bind(hosts: Sequence[str], keys: Keys) -> None:
    """Raises InvalidOption for an address that others can reach, without a key: a workspace is private."""
    for host in hosts:
        if not keys.are_needed and not is_loopback(host):
            raise InvalidOption(
                "--host", host, "other machines could read every workspace: there is no API key",
                hint="Give one with --api-key or --api-key-file, or listen on 127.0.0.1.",
            )  # fmt: skip


def is_address(host: str) -> bool:
    """An IP address, or the name of this machine: nobody else decides where it leads."""
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Only this machine can connect to this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

"""Does what will be needed while something else is waited for: a model that is being loaded."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from typing import Final

_PARTS: Final = [
    "native.kernels:load",
    "native.chat_shim:load",
    "policies",
    "conversation",
    "workspace.workspace",
]
"""Modules of this package that a workspace is made of, and functions of modules."""

_OTHERS: Final = ("numpy.random",)
_SWITCH_INTERVAL: Final = 2e-4  # seconds

_wanted = list(_PARTS)
_lock = threading.Lock()  # of the next two
_n_importing = 0
_usual_interval = 0.0


def want(*modules: str) -> None:
    """Modules of this package that the next engine should import ahead."""
    _wanted.extend(name for name in modules if name not in _wanted)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Within, a thread imports what is wanted. Who needs one of these modules earlier waits for it, and is
    told what is wrong with it.

    llama.cpp reports while it loads a model, and cannot go on before a thread of Python took each line: the
    importing one must give way at once, not after the usual 5 ms.
    """
    thread = threading.Thread(target=_work, args=(tuple(_wanted),), name="kvmem-imports", daemon=True)
    _give_way()
    try:
        thread.start()
        yield
        thread.join()
    finally:
        _give_way_no_more()


def _give_way() -> None:
    global _n_importing, _usual_interval
    with _lock:
        if not _n_importing:
            _usual_interval = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_INTERVAL)
        _n_importing += 1


def _give_way_no_more() -> None:
    """Of several that import at once, the last one brings back the usual interval."""
    global _n_importing
    with _lock:
        _n_importing -= 1
        if not _n_importing:
            sys.setswitchinterval(_usual_interval)


def _work(wanted: tuple[str, ...]) -> None:
    package = __name__.rpartition(".")[0]
    for name in wanted:
        module, _, function = f"{package}.{name}".partition(":")
        with contextlib.suppress(Exception):
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()
    for name in _OTHERS:
        importlib.import_module(name)

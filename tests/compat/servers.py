"""Starts `kvmem serve` or a stock llama-server on a free port of 127.0.0.1, and asks it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

# Of both servers. With these types of cells results depend neither on batch shapes nor on neighbours.
FLAGS: Final = (
    "-c", "4096", "-np", "2", "--temp", "0", "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on", "-t", "2",
    "--alias", "smol", "--metrics",
)  # fmt: skip

# For coding agents, beside FLAGS: the small model's own template shows no tools. <here>: this folder.
AGENT_FLAGS: Final = ("--jinja", "--chat-template-file", "<here>/tools.jinja")

_START_SECONDS: Final = 120
_ANSWER_SECONDS: Final = 120


@dataclass(frozen=True, slots=True)
class Request:
    """One request. body: JSON; text: a body as it is, JSON or not."""

    id: str
    method: str
    path: str
    body: Any = None
    text: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, row: dict[str, Any]) -> Request:
        headers = tuple(row.pop("headers", {}).items())
        return cls(headers=headers, **row)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. body: a JSON value, or a text; events: of a stream, each (name, JSON value or text)."""

    status: int
    type: str
    body: Any = None
    events: tuple[tuple[str, Any], ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """To be kept in a file."""
        found: dict[str, Any] = {"status": self.status, "type": self.type}
        if self.events is None:
            return found | {"body": self.body}
        return found | {"events": [list(event) for event in self.events]}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Answer:
        events = row.get("events")
        kept = None if events is None else tuple((name, data) for name, data in events)
        return cls(row["status"], row["type"], row.get("body"), kept)


def requests_of(path: Path) -> list[Request]:
    """The requests of a data file."""
    return [Request.of(row) for row in json.loads(path.read_text(encoding="utf-8"))]


class Server:
    """A running server; ended with the `with`."""

    def __init__(self, command: Sequence[str | Path], log: Path, env: dict[str, str] | None = None) -> None:
        """command: without the port, which is chosen here. log: file for what it writes."""
        self.port: Final = free_port()
        self.url: Final = f"http://127.0.0.1:{self.port}"
        self.log: Final = log
        with log.open("wb") as out:
            self.process: Final = subprocess.Popen(
                [*map(str, command), "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | (env or {}),
            )
        # The stock server ends a connection after a stream, and does not say so.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.client: Final = httpx.Client(
            base_url=self.url, timeout=_ANSWER_SECONDS, trust_env=False, limits=limits
        )

    def wait(self) -> Self:
        """Until it is ready. Raises RuntimeError with its log if it ends or takes too long."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.client.get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.log.read_text(errors='replace')[-4000:]}")

    def ask(self, request: Request) -> Answer:
        data = request.text.encode() if request.text is not None else None
        if request.text is None and request.body is not None:
            data = json.dumps(request.body).encode()
        headers = {"content-type": "application/json", **dict(request.headers)}
        answer = self.client.request(request.method, request.path, content=data, headers=headers)
        kind = answer.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            return Answer(answer.status_code, kind, events=tuple(events_of(answer.text)))
        return Answer(answer.status_code, kind, json_or_text(answer.text))

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Ends it -> its exit code; idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.stop()


def stock_server(program: Path, model: Path, folder: Path, *flags: str) -> Server:
    """A stock llama-server. folder: for its log and its slots."""
    return Server([program, "-m", model, *FLAGS, *_slots(folder), *flags], folder / "stock.log")


def our_server(model: Path, folder: Path, *flags: str) -> Server:
    """`kvmem serve` of the installed package, with its workspaces in `folder`."""
    command = [sys.executable, "-m", "kvmem_llama.cli.main", "serve", "-m", model, *FLAGS, *_slots(folder)]
    return Server([*command, *flags], folder / "ours.log", {"KVMEM_DATA_DIR": str(folder / "workspaces")})


def _slots(folder: Path) -> list[str]:
    (folder / "slots").mkdir(exist_ok=True, parents=True)
    return ["--slot-save-path", f"{folder / 'slots'}/"]


def in_here(flags: Sequence[str]) -> list[str]:
    """`flags` with the path of this folder in them."""
    return [flag.replace("<here>", str(Path(__file__).parent)) for flag in flags]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def events_of(text: str) -> list[tuple[str, Any]]:
    """Events of a stream: (name or "", data); pings are left out. Raises ValueError for what is no stream."""
    found: list[tuple[str, Any]] = []
    for part in text.split("\n\n"):
        name, data = "", None
        for line in part.split("\n"):
            field, colon, value = line.partition(":")
            if field == "event":
                name = value.strip()
            elif field == "data":
                data = json_or_text(value.removeprefix(" "))
            elif line and not (colon and not field):
                raise ValueError(f"no line of a stream: {line!r}")
        if data is not None:
            found.append((name, data))
    return found

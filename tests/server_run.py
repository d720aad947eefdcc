"""A server in this process: the real application on a real port, over the real model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import uvicorn

from kvmem_llama.server.app import create_app
from kvmem_llama.server.flags import ServerOptions
from kvmem_llama.server.generate import make_slots, pool_of
from kvmem_llama.server.slots import SlotPool
from kvmem_llama.server.state import ServerState
from kvmem_llama.settings import Settings


class ServerRun:
    """Use it in a `with`: it serves within."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        self.state: Final = ServerState(
            settings, ServerOptions(log_disable=True, **options), make_slots=make_slots
        )
        self.state.load()
        self._socket: Final = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url: Final = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(create_app(self.state), log_level="error", timeout_graceful_shutdown=5)
        self._server: Final = uvicorn.Server(config)
        self._thread: Final = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self.client: Final = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    @property
    def slots(self) -> SlotPool:
        return pool_of(self.state)

    def post(self, path: str, **body: Any) -> Any:
        """The JSON of an answer; AssertionError for anything but 200."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def lines(self, path: str, **body: Any) -> Iterator[str]:
        """Lines of a stream that are not empty, while they come."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            yield from filter(None, answer.iter_lines())

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join()
        self.state.close()


def settings_of(model: Path, folder: Path, **options: Any) -> Settings:
    """Two slots, greedy, with cells whose results do not depend on batch shapes."""
    return Settings(
        **{
            "model": str(model),
            "data_dir": str(folder),
            "n_ctx": 512,
            "n_parallel": 2,
            "temp": 0.0,
            "n_threads": 1,
            "cache_type_k": "q8_0",
            "cache_type_v": "q8_0",
            **options,
        }
    )

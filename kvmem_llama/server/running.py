"""Runs the application until it is told to end: sockets, signals, the log."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from .. import models
from ..errors import InvalidOption
from ..settings import Settings
from .app import create_app
from .flags import ServerOptions
from .state import ServerState

log: Final = logging.getLogger("kvmem.server")


def run(state: ServerState) -> None:
    """Serves until SIGINT or SIGTERM. What runs then is stopped and committed; a second signal ends at once.

    Raises InvalidOption for an address that cannot be used, and what kept the model from being loaded.
    """
    models.check(state.settings.model, state.settings.cache_path)
    check_folder(state.settings)
    open_log(state.options)
    sockets = bind(state.options.hosts, state.options.port)
    failures: list[BaseException] = []
    server: _Server | None = None

    def failed(error: BaseException) -> None:
        failures.append(error)
        if server is not None:
            server.should_exit = True

    server = _Server(create_app(state, failed), state)
    for one in sockets:
        host, port = one.getsockname()[:2]
        log.info("listening on http://%s:%d, loading the model", f"[{host}]" if ":" in host else host, port)
    try:
        server.run(sockets=sockets)
    finally:
        for one in sockets:
            one.close()
        state.close()
    if failures:
        raise failures[0]


class _Server(uvicorn.Server):
    """Ends as llama-server does: with code 0 after a first signal, at once after a second."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",  # whatever else is there: it bounds the size of headers, and keeps their names
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                timeout_graceful_shutdown=state.options.grace + 1,
                timeout_keep_alive=75,
                h11_max_incomplete_event_size=64 << 10,
            )
        )
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
        self._state.stop_soon()


def check_folder(settings: Settings) -> None:
    """Raises InvalidOption for a folder of workspaces that cannot be written to."""
    folder = settings.data_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidOption("--data-dir", str(folder), why, hint="Choose another.") from None


def bind(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Sockets that listen on every address. Raises InvalidOption; then none stays open."""
    found: list[socket.socket] = []
    try:
        for host in hosts:
            family, kind, proto, _, address = socket.getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            one = socket.socket(family, kind, proto)
            found.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
            one.listen(128)
    except OSError as error:
        for one in found:
            one.close()
        why = error.strerror or str(error)
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        option, value = ("--port", port) if is_port else ("--host", host)
        raise InvalidOption(
            option, value, f"cannot listen on {host}: {why}", hint="Choose another."
        ) from None
    return found


def open_log(options: ServerOptions) -> None:
    """Lines of the log on standard error, or in a file. Raises InvalidOption."""
    form = "%(asctime)s %(message)s" if options.log_timestamps else "%(message)s"
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if options.log_file:
        try:
            handler = logging.FileHandler(options.log_file, encoding="utf-8")
        except OSError as error:
            why = error.strerror or str(error)
            raise InvalidOption("--log-file", options.log_file, why, hint="Choose another.") from None
    handler.setFormatter(logging.Formatter(form))
    for name, level in (("kvmem", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False

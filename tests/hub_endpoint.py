"""A hub on 127.0.0.1: the part of Hugging Face's protocol that its client needs to list and fetch files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories as dictionaries of files, and what went wrong on the way."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.damaged: set[str] = set()  # files whose bytes are not those of their checksum
        self.cut: dict[str, int] = {}  # bytes of a file after which its connection breaks, once
        self.small: set[str] = set()  # files that are blobs of git: no sha256
        self.gets: list[tuple[str, str]] = []  # (file, its Range header)
        self.url = ""

    def bytes_of(self, repo: str, file: str) -> bytes:
        content = self.repos[repo][file]
        return content[:-1] + bytes([content[-1] ^ 1]) if file in self.damaged else content


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Answers at `hub.url` until the end."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._describe("/".join(parts[2:4]))
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), "/".join(parts[4:]), body=body)
        else:
            self._refuse(404, "EntryNotFound")

    def _describe(self, repo: str) -> None:
        if repo not in self.hub.repos:
            return self._refuse(401, "RepoNotFound")
        if repo in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        files = [
            {"rfilename": name, "size": len(content), "blobId": _git_hash(content)}
            | ({} if name in self.hub.small else {"lfs": _lfs(content)})
            for name, content in self.hub.repos[repo].items()
        ]
        answer = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": files, "tags": []}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _file(self, repo: str, file: str, *, body: bool) -> None:
        content = self.hub.bytes_of(repo, file)
        true = self.hub.repos[repo][file]
        etag = _git_hash(true) if file in self.hub.small else _lfs(true)["sha256"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if not body:
            return self._send(200, headers | {"Content-Length": str(len(content))}, b"")
        span = self.headers.get("Range", "")
        self.hub.gets.append((file, span))
        status, start = 200, 0
        if span.startswith("bytes="):
            status, start = 206, int(span[6:].partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        piece = content[start:]
        cut = self.hub.cut.pop(file, None)
        if cut is None:
            return self._send(status, headers, piece)
        self.close_connection = True
        self._send(status, headers | {"Content-Length": str(len(piece))}, piece[:cut])
        self.connection.close()

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            self.wfile.flush()


def _lfs(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

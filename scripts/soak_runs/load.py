"""Eight clients at once, some of which go away in mid-answer: what the others get is what they get alone.

Beside it the stock server under the same load, in turns; and how long a short request waits behind a long
one.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .common import ROOT, fast_folder, manual_text, say, scaled

sys.path.insert(0, str(ROOT / "tests" / "compat"))

from servers import Server, our_server, stock_server

STOCK = ROOT / "build" / "stock_server" / "bin" / "llama-server"
N_CLIENTS = 8
N_REQUESTS = 50  # of each client
N_PROMPTS = 40
SHARE_CUT = 0.3
N_ANSWER = 24  # tokens
FLAGS = ("-np", "4", "-c", "4096", "--kv-unified", "--slots")
N_LONG = 20_000  # tokens of the prompt that short ones wait behind
N_SHORT = 10
MOST_MORE_MEMORY = 1.05


@dataclass
class Round:
    """What one round of load gave."""

    seconds: float = 0.0
    n_tokens: int = 0  # of answers, those of clients that went away too
    first: list[float] = field(default_factory=list)  # seconds to the first token
    n_whole: int = 0
    n_cut: int = 0
    wrong: list[str] = field(default_factory=list)


def run(model: Path, stock: Path | None = None, scale: float = 1.0) -> None:
    """stock: a stock llama-server; without one nothing is compared with it."""
    _right_answers(model, scaled(N_REQUESTS, scale))
    _speed(model, stock or STOCK, scaled(N_REQUESTS / 4, scale))


def _right_answers(model: Path, n: int) -> None:
    """Exact mode: elsewhere results depend on which cells a history got, in the stock library, too. Histories
    are kept, found again and rebuilt meanwhile."""
    prompts = _prompts()
    with fast_folder() as folder, our_server(model, folder, *FLAGS, "--exact") as server:
        alone = [_text(server, prompt) for prompt in prompts]
        memory: list[int] = []
        for part in range(2):
            found = _load(server, prompts, alone, max(n // 2, 1), part, cached=True)
            _say("exact", found)
            assert not found.wrong, found.wrong[:5]
            _assert_idle(server)
            memory.append(_rss(server))
    say(f"memory after each half: {', '.join(f'{n >> 20} MiB' for n in memory)}")
    assert memory[-1] <= MOST_MORE_MEMORY * memory[0], memory


def _speed(model: Path, program: Path, n: int) -> None:
    """Every prompt is read anew, by both servers. n: requests of a client in each round."""
    prompts = _prompts()
    with fast_folder() as folder, ExitStack() as stack:
        servers = {"ours": stack.enter_context(our_server(model, folder, *FLAGS))}
        if program.is_file():
            servers["stock"] = stack.enter_context(stock_server(program, model, folder, *FLAGS))
        else:
            say(f"no comparison: {program} is missing (scripts/build_stock server builds it)")
        alone = {name: [_text(server, prompt) for prompt in prompts] for name, server in servers.items()}
        rounds: dict[str, list[Round]] = {name: [] for name in servers}
        for seed, name in enumerate(("ours", "stock", "stock", "ours")):
            if name in servers:
                rounds[name].append(_load(servers[name], prompts, alone[name], n, seed, cached=False))
                _say(name, rounds[name][-1])
        if "stock" in servers:
            _compare(rounds["ours"], rounds["stock"])
            servers["stock"].stop()
        _behind_a_long_one(servers["ours"])


def _prompts() -> list[str]:
    """Questions of 20 to 400 tokens."""
    text, rng = manual_text(), random.Random(1)
    starts = [rng.randrange(len(text) - 2000) for _ in range(N_PROMPTS)]
    return [f"{i}. {text[at : at + rng.randrange(80, 1600)]}" for i, at in enumerate(starts)]


def _body(prompt: str, n: int = N_ANSWER, *, cached: bool = False) -> dict[str, Any]:
    greedy = {"temperature": 0, "ignore_eos": True}
    return {"prompt": prompt, "n_predict": n, "stream": True, "cache_prompt": cached, **greedy}


def _events(server: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with server.client.stream("POST", "/completion", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def _text(server: Server, prompt: str) -> str:
    return "".join(event["content"] for event in _events(server, _body(prompt)))


def _load(
    server: Server, prompts: Sequence[str], alone: Sequence[str], n: int, seed: int, *, cached: bool
) -> Round:
    """alone: the answers that the server gives when it is asked one thing at a time. n: requests of each
    client. cached: a prompt that is asked again is not read again."""
    found, lock = Round(), threading.Lock()

    def client(number: int) -> None:
        rng = random.Random(f"{seed}.{number}")
        for _ in range(n):
            which, n_lines = rng.randrange(len(prompts)), None
            if rng.random() < SHARE_CUT:
                n_lines = rng.randrange(N_ANSWER // 2)  # events until the client goes away
            began, first, pieces = time.monotonic(), 0.0, []
            if n_lines == 0:
                with server.client.stream("POST", "/completion", json=_body(prompts[which], cached=cached)):
                    pass  # away before anything came
            else:
                for event in _events(server, _body(prompts[which], cached=cached)):
                    first = first or time.monotonic() - began
                    pieces.append(event["content"])
                    if n_lines is not None and len(pieces) >= n_lines:
                        break
            with lock:
                found.n_tokens += len(pieces)
                found.first += [first] if first else []
                found.n_cut += n_lines is not None
                if n_lines is None:
                    found.n_whole += 1
                    if "".join(pieces) != alone[which]:
                        found.wrong.append(f"{which}: {''.join(pieces)!r} instead of {alone[which]!r}")

    began = time.monotonic()
    with ThreadPoolExecutor(N_CLIENTS) as pool:
        list(pool.map(client, range(N_CLIENTS)))
    found.seconds = time.monotonic() - began
    return found


def _say(name: str, one: Round) -> None:
    p50, p95 = np.quantile(one.first, (0.5, 0.95))
    say(
        f"{name}: {one.n_whole} answers, {len(one.wrong)} of them not as alone, {one.n_cut} cut; "
        f"{one.n_tokens / one.seconds:.1f} tokens/s; first token {p50:.2f} s (p50), {p95:.2f} s (p95)"
    )


def _compare(ours: Sequence[Round], stock: Sequence[Round]) -> None:
    speed = [sum(r.n_tokens for r in side) / sum(r.seconds for r in side) for side in (ours, stock)]
    first = [statistics.median([t for r in side for t in r.first]) for side in (ours, stock)]
    say(f"ours / stock: throughput {speed[0] / speed[1]:.2f}, time to first token {first[0] / first[1]:.2f}")


def _assert_idle(server: Server) -> None:
    """Every slot is free, a moment after the last client went away."""
    for _ in range(50):
        busy = [slot["id"] for slot in server.client.get("/slots").json() if slot["is_processing"]]
        if not busy:
            return
        time.sleep(0.2)
    raise AssertionError(f"slots {busy} still work for clients that are gone")


def _behind_a_long_one(server: Server) -> None:
    """How long short requests wait for their first token while a long prompt is read, in its batches."""
    tokens = server.client.post("/tokenize", json={"content": manual_text()}).json()["tokens"][:N_LONG]
    times: list[float] = []  # of its progress

    def read() -> None:
        body = {**_body("", 1), "prompt": tokens, "return_progress": True}
        with server.client.stream("POST", "/completion", json=body, timeout=None) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and "prompt_progress" in json.loads(line[6:]):
                    times.append(time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    waits: list[float] = []
    while thread.is_alive() and len(waits) < N_SHORT:
        if len(times) > 4:
            began = time.monotonic()
            next(iter(_events(server, _body(f"{len(waits)} and a half", 4))))
            waits.append(time.monotonic() - began)
        time.sleep(0.5)
    thread.join()
    if not waits or len(times) < 2:
        say("the long prompt was read too soon to ask for anything meanwhile")
        return
    batch = statistics.median(b - a for a, b in itertools.pairwise(times))
    shown = ", ".join(f"{wait / batch:.1f}" for wait in waits)
    say(f"behind a prompt of {len(tokens):,} tokens, first token after {shown} batches of {batch:.2f} s")
    assert statistics.median(waits) <= 3 * batch


def _rss(server: Server) -> int:
    """Bytes of the server's process."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * 4096

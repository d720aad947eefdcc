"""A process that reads and answers with a real model and is killed on the way: python model_kill.py CASE.

The case is a JSON file. Each step that is acknowledged becomes a line of the log beside it, with everything
that was told: the next process goes on where the last one was killed, and must tell the same.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from store_kill import Killer

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.memory import invariants
from kvmem_llama.memory.session import Session
from kvmem_llama.settings import Settings
from kvmem_llama.store.files import install
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.workspace import Workspace, WorkspaceEngine, open_engine

N_PIECE = 250  # tokens of one step that reads
N_ANSWER = 6

QUESTIONS = (
    "\nWhat is there after a power cut?\n",
    "\nHow is a block read again?\n",
    "\nWhich file holds the index?\n",
)

# Moments of the engine and of the store.
POINTS = (
    "phase.read", "phase.query", "phase.replay", "phase.decode", "stage_out", "data_write.after",
    "sync.before", "read_ahead.statements", "index_append.rows", "row_commit.before",
    "row_commit.statements", "row_commit.after",
)  # fmt: skip

Step = list[Any]
Told = dict[str, Any]


def make_script(n_pieces: int) -> list[Step]:
    """Reads a text in pieces; a question after every second one."""
    steps: list[Step] = []
    for piece in range(n_pieces):
        steps.append(["read", piece])
        if piece % 2:
            steps.append(["ask", piece // 2 % len(QUESTIONS)])
    return steps


# -- the process that is killed


class Digest:
    """Of the logits that answers are sampled from."""

    def __init__(self, engine: WorkspaceEngine) -> None:
        self._seen = xxhash.xxh3_128()
        decoder = engine.core.decoder
        logits = decoder.logits

        def keep(index: int) -> Any:
            found = logits(index)
            self._seen.update(np.ascontiguousarray(found).data)
            return found

        decoder.logits = keep  # type: ignore[method-assign]

    def take(self) -> str:
        digest = self._seen.hexdigest()
        self._seen.reset()
        return digest


def run_case(path: Path) -> None:
    case = json.loads(path.read_text())
    folder = path.parent
    killer = Killer(case["point"], case["nth"])
    install(killer)
    Session.after_step = staticmethod(invariants.check)
    settings = Settings(
        n_ctx=512, n_threads=2, exact=True, raw_k_type="f32", commit_blocks=2, data_dir=str(folder / "data")
    )
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    n_done = len((folder / "log").read_text().splitlines())

    def acknowledge(told: Told) -> None:
        os.write(log, (json.dumps(told) + "\n").encode())

    with open_engine(Path(case["model"]), settings) as engine:
        engine.observe(lambda report: killer.at(f"phase.{report.pieces[0].phase.value}"))
        digest = Digest(engine)
        vocab = engine.core.model.vocab
        tokens = vocab.tokenize(case["text"], add_bos=True, parse_special=False)
        with engine.workspace("notes") as ws:
            history: Sequence[int] = case["history"]
            if case["lengths"]:
                here = ws.history().tolist()
                allowed = case["lengths"][n_done : n_done + 2]
                assert len(here) in allowed, f"{len(here)} tokens after step {n_done} of {case['lengths']}"
                assert here == history[: len(here)], "other tokens"
                if len(here) != allowed[0]:
                    acknowledge({"there": True})  # it was done, but nobody was told
                    n_done += 1
            for step in case["steps"][n_done:]:
                acknowledge(do_step(ws, step, tokens, vocab, digest))
            if not case["lengths"]:
                (folder / "history.json").write_text(json.dumps(ws.history().tolist()))
    (folder / "points.json").write_text(json.dumps(killer.points))


def do_step(ws: Workspace, step: Step, tokens: Any, vocab: Any, digest: Digest) -> Told:
    kind, number = step
    if kind == "read":
        result = ws.read_tokens(tokens[number * N_PIECE : (number + 1) * N_PIECE]).result()
    else:
        question = vocab.tokenize(QUESTIONS[number], add_bos=False, parse_special=False)
        result = ws.step(question, 0, sampling=SamplingParams(temp=0), max_tokens=N_ANSWER).result()
    recalls = [[[b.start, b.rank, b.score, b.why, b.position] for b in r.blocks] for r in result.recalls]
    return {
        "n_tokens": ws.n_tokens,
        "answer": list(result.tokens),
        "recalls": recalls,
        "logits": digest.take() if kind == "ask" else "",
    }


# -- the one that looks on


@dataclass
class Kills:
    """How they ended."""

    points: Counter[str] = field(default_factory=Counter)
    n_there: int = 0  # the step that was under way was done, though nobody was told
    n_same: int = 0  # steps after a kill that told what they tell without one


class Bench:
    """A script, what it tells when nobody kills it, and processes that are killed."""

    def __init__(self, folder: Path, model: Path, text: str, n_pieces: int) -> None:
        """folder: an empty one."""
        self._folder: Final = folder
        self._case: dict[str, Any] = {
            "model": str(model), "text": text, "steps": make_script(n_pieces), "lengths": [], "history": [],
            "point": "", "nth": 0,
        }  # fmt: skip
        whole = folder / "whole"
        assert not self._run(whole, "", 0), "killed by somebody else"
        self.expected: Final[list[Told]] = self._log(whole)
        self.n_points: Final[dict[str, int]] = json.loads((whole / "points.json").read_text())
        assert any(told["recalls"] for told in self.expected), "nothing is recalled"
        self._case["lengths"] = [0, *(told["n_tokens"] for told in self.expected)]
        self._case["history"] = json.loads((whole / "history.json").read_text())

    def kill(self, n_kills: int, rng: random.Random, points: Sequence[str] = POINTS) -> Kills:
        """So many kills, each at one of the points in turn; then the rest of the last script."""
        kills = Kills()
        chain = 0
        while kills.points.total() < n_kills:
            here = self._folder / f"chain {chain}"
            point = points[kills.points.total() % len(points)]
            assert self.n_points.get(point), f"{point} is never passed"
            if self._run(here, point, rng.randrange(1, max(self.n_points[point] // 3, 1) + 1)):
                kills.points[point] += 1
                self._check_files(here)
            if len(self._log(here)) == len(self.expected):
                self._compare(here, kills)
                chain += 1
        here = self._folder / f"chain {chain}"
        if here.exists():
            assert not self._run(here, "", 0)
            self._compare(here, kills)
        return kills

    # -- private

    def _run(self, folder: Path, point: str, nth: int) -> bool:
        """-> whether the process was killed; else it came to the end of the script."""
        folder.mkdir(exist_ok=True)
        case = folder / "case.json"
        case.write_text(json.dumps(self._case | {"point": point, "nth": nth}))
        # With PYTHONSAFEPATH set Python does not look for modules beside the script.
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, str(Path(__file__)), str(case)],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, -9), done.stderr[-4000:]
        return done.returncode == -9

    def _log(self, folder: Path) -> list[Told]:
        return [json.loads(line) for line in (folder / "log").read_text().splitlines()]

    def _check_files(self, folder: Path) -> None:
        root = Root(folder / "data")
        for family in root.family_ids():
            wrong = [f for f in verify_family(root, family).findings if f.kind not in ("file", "index")]
            assert not wrong, wrong

    def _compare(self, folder: Path, kills: Kills) -> None:
        for told, expected in zip(self._log(folder), self.expected, strict=True):
            if told.get("there"):
                kills.n_there += 1
            else:
                assert told == expected, f"{told} instead of {expected}"
                kills.n_same += 1


if __name__ == "__main__":
    run_case(Path(sys.argv[1]))

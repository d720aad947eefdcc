"""Workspaces whose process is killed at a named point of the store's work, and what must be true afterwards.

A server process forks one child for each case: the child runs a script of operations and kills itself where
it is told to. What it has finished it writes to a log, so that the parent knows what was acknowledged.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from durable_run import BLOCK, Memory, make_binding, make_root, open_records, record_of

from kvmem_llama.errors import KvmemError, StoreError
from kvmem_llama.store.compact import compact
from kvmem_llama.store.deleting import delete_workspace
from kvmem_llama.store.export import export_workspace
from kvmem_llama.store.files import Files, install
from kvmem_llama.store.holding import Holding
from kvmem_llama.store.importing import import_workspace
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.store.tables import SEGMENTS, SLOTS

Op = list[Any]
State = dict[str, list[int]]  # name -> tokens

# Points by the work they belong to. Every one is passed by the scripts below.
GROUPS: dict[str, tuple[str, ...]] = {
    "stage_out": ("stage_out",),
    "data_write": ("data_write.before", "data_write.after"),
    "sync": ("sync.before", "sync.after"),
    "row_commit": ("row_commit.before", "row_commit.statements", "row_commit.after"),
    "index_append": ("index_append.before", "index_append.rows", "index_append.after"),
    "fork": ("fork.before", "fork.statements", "fork.after"),
    "truncate": ("truncate.before", "truncate.statements", "truncate.after"),
    "rewrite": ("rewrite.before", "rewrite.statements", "rewrite.after"),
    "compact": ("compact.begin", "compact.written", "compact.statements", "compact.after", "compact.end"),
    "delete": (
        "delete.before", "delete.statements", "delete.after", "delete.files", "erase.before", "erase.after",
    ),
    "export": ("export.before", "export.record", "export.written", "export.after"),
    "import": ("import.record", "import.statements", "import.filled", "import.after"),
    "create": ("create.catalog", "create.statements", "create.folder", "create.after"),
    "segment": ("segment.before", "segment.named", "segment.after", "segment.statements"),
    "ahead": ("read_ahead.before", "read_ahead.statements", "read_ahead.after"),
    "rename": ("rename.before", "rename.statements", "rename.after"),
}  # fmt: skip


# Of these, what is found afterwards tells whether the operation under way was done, and both must be met.
BOTH = {
    "stage_out", "data_write", "sync", "row_commit", "index_append", "fork", "truncate", "rewrite", "compact",
    "delete", "export", "import", "create", "rename",
}  # fmt: skip
OFTEN = {"stage_out", "data_write", "sync", "index_append"}  # passed many times in a script

# Their points come before the transaction of their own step: only the step of another workspace, at work in
# the same process, can be there when they end the process.
BESIDE = {"stage_out", "data_write", "sync"}

KINDS = ("truncate", "rewrite", "fork", "delete", "compact", "export", "import", "ahead", "rename", "create")


def make_script(seed: int, group: str = "", n_ops: int = 12) -> list[Op]:
    """Operations that can be carried out one after the other; half of them of a group, if it has some."""
    rng = random.Random(seed)
    ops: list[Op] = [["create", "a"], ["step", "a", [rng.randrange(50) for _ in range(rng.randrange(5, 30))]]]
    names, lengths, made = ["a"], {"a": len(ops[1][2])}, 1
    for _ in range(n_ops):
        name = rng.choice(names)
        kind = (
            group
            if group in KINDS and rng.random() < 0.5
            else rng.choice(
                ["step"] * 4
                + [
                    "truncate",
                    "truncate",
                    "fork",
                    "fork",
                    "delete",
                    "compact",
                    "export",
                    "import",
                    "ahead",
                    "rename",
                ]
            )
        )
        if kind in ("fork", "create", "import", "rename"):
            made += 1
        new = f"w {made}"
        match kind:
            case "step":
                ids = [rng.randrange(50) for _ in range(rng.randrange(1, 14))]
                ops.append(["step", name, ids])
                lengths[name] += len(ids)
            case "truncate":
                n = rng.randrange(0, lengths[name] + 1)
                ops.append(["truncate", name, n])
                lengths[name] = n
            case "rewrite":
                n = rng.randrange(0, lengths[name] + 1)
                ids = [rng.randrange(50) for _ in range(rng.randrange(0, 20))]
                ops.append(["rewrite", name, n, ids])
                lengths[name] = n + len(ids)
            case "create" if len(names) < 4:
                ops.append(["create", new])
                names.append(new)
                lengths[new] = 0
            case "fork" | "import" if len(names) < 4:
                ops.append([kind, name, new])
                names.append(new)
                lengths[new] = lengths[name]
            case "rename":
                ops.append(["rename", name, new])
                names[names.index(name)] = new
                lengths[new] = lengths.pop(name)
            case "delete" if len(names) == 1:
                made += 1
                ops.append(["fork", name, f"w {made}"])
                names.append(f"w {made}")
                lengths[f"w {made}"] = lengths[name]
            case "delete":
                ops.append(["delete", name])
                names.remove(name)
                del lengths[name]
            case "compact" | "export":
                ops.append([kind, name])
            case "ahead":
                ops.append(["ahead", name, [rng.randrange(50) for _ in range(rng.randrange(4, 20))]])
    return ops


def make_pair(seed: int, n_ops: int = 8) -> tuple[list[Op], dict[str, list[Op]]]:
    """Operations that make two workspaces of one family, and what two threads do with them at once."""
    rng = random.Random(seed)
    start = [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
    first: list[Op] = [["create", "a"], ["step", "a", start], ["fork", "a", "b"]]
    beside: dict[str, list[Op]] = {"a": [], "b": []}
    for name, ops in beside.items():
        length = len(start)
        for _ in range(n_ops):
            if rng.random() < 0.2:
                length = rng.randrange(length + 1)
                ops.append(["truncate", name, length])
            else:
                ids = [rng.randrange(50) for _ in range(rng.randrange(1, 14))]
                length += len(ids)
                ops.append(["step", name, ids])
    return first, beside


def after(state: State, op: Op) -> State:
    """What the workspaces hold when an operation is done."""
    kind, name = op[0], op[1]
    new = dict(state)
    match kind:
        case "create":
            new[name] = []
        case "step":
            new[name] = state[name] + op[2]
        case "truncate":
            new[name] = state[name][: op[2]]
        case "rewrite":
            new[name] = state[name][: op[2]] + op[3]
        case "fork" | "import":
            new[op[2]] = state[name]
        case "rename":
            new[op[2]] = new.pop(name)
        case "delete":
            del new[name]
    return new


# -- the process that is killed


class Killer(Files):
    """Kills the process when a point is reached the n-th time. Counts all points."""

    def __init__(self, point: str = "", nth: int = 0) -> None:
        super().__init__()
        self._point = point
        self._left = nth
        self._lock = threading.Lock()
        self.points: dict[str, int] = {}

    def at(self, point: str) -> None:
        with self._lock:
            self.points[point] = self.points.get(point, 0) + 1
            if point == self._point:
                self._left -= 1
                if self._left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)


def run_script(folder: Path, ops: list[Op], files: Files) -> None:
    """Carries out the operations and writes the number of each one that is done to the log."""
    install(files)
    root = make_root(folder, files)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    open_ones: dict[str, Memory] = {}

    def opened(name: str) -> Memory:
        if name not in open_ones:
            open_ones[name] = Memory(root, root.find(name))
        return open_ones[name]

    def closed(name: str) -> None:
        if name in open_ones:
            open_ones.pop(name).close()

    for number, op in enumerate(ops):
        kind, name = op[0], op[1]
        match kind:
            case "create":
                root.create(name, make_binding())
            case "step":
                opened(name).step(op[2], kind="ask", answer=f"answer {number}")
            case "truncate":
                opened(name).truncate(op[2])
            case "rewrite":
                opened(name).rewrite(op[2], op[3])
            case "fork":
                open_ones[op[2]] = opened(name).fork(op[2])
            case "rename":
                root.rename(root.find(name), op[2])
                if name in open_ones:
                    open_ones[op[2]] = open_ones.pop(name)
            case "delete":
                closed(name)
                delete_workspace(root, root.find(name))
            case "compact":
                (folder / "before compact").write_text(json.dumps(places(opened(name))))
                compact(opened(name).holding, opened(name).store)
            case "ahead":
                opened(name).read_ahead(op[2])
            case "export":
                export_workspace(opened(name).holding, opened(name).store, folder / f"export {number}")
            case "import":
                export_workspace(opened(name).holding, opened(name).store, folder / f"export {number}")
                import_workspace(root, folder / f"export {number}", op[2], segment_records=4)
        os.write(log, f"{number}\n".encode())
        files.at("acknowledged")
    for name in list(open_ones):
        closed(name)
    os.close(log)


def run_pair(folder: Path, first: list[Op], beside: dict[str, list[Op]], files: Files) -> None:
    """Carries out `first`, then the operations of each workspace in a thread with a log of its own."""
    run_script(folder, first, files)
    root = make_root(folder, files)
    failed: list[BaseException] = []

    def work(name: str, ops: list[Op]) -> None:
        try:
            log = os.open(folder / f"log {name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            memory = Memory(root, root.find(name))
            for number, (kind, _, what) in enumerate(ops):
                memory.step(what) if kind == "step" else memory.truncate(what)
                os.write(log, f"{number}\n".encode())
            memory.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=item) for item in beside.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def places(memory: Memory) -> list[str]:
    """Where the records of a workspace are."""
    return [str(memory.store.locate(block.ref)) for block in memory.blocks]


def serve() -> None:
    """Reads cases as lines of JSON; answers with how each one ended."""
    for line in sys.stdin:
        case = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                files = Killer(case["point"], case["nth"])
                if case["beside"]:
                    run_pair(Path(case["folder"]), case["ops"], case["beside"], files)
                else:
                    run_script(Path(case["folder"]), case["ops"], files)
                (Path(case["folder"]) / "points.json").write_text(json.dumps(files.points))
                code = 0
            except BaseException as error:
                (Path(case["folder"]) / "error").write_text(repr(error))
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"killed": os.WIFSIGNALED(status), "code": status}), flush=True)


class Server:
    """The process that forks."""

    def __init__(self) -> None:
        here = str(Path(__file__).parent)
        code = f"import sys; sys.path.insert(0, {here!r}); import store_kill; store_kill.serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self, folder: Path, ops: list[Op], point: str, nth: int, beside: dict[str, list[Op]] | None = None
    ) -> bool:
        """-> whether the child was killed where it was told to; else the script came to its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        case = {"folder": str(folder), "ops": ops, "point": point, "nth": nth, "beside": beside}
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        error = folder / "error"
        assert not error.exists(), error.read_text()
        return bool(answer["killed"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


# -- afterwards


@dataclass
class Outcome:
    """What was found after a kill."""

    is_done: bool | None = None  # the operation that was under way: there, not there, or not to be told
    op: Op = field(default_factory=list)


def check_after(folder: Path, ops: list[Op]) -> Outcome:
    """Everything that was acknowledged is there, nothing is wrong, and no space is lost."""
    n_done = n_acknowledged(folder / "log")
    before: State = {}
    for op in ops[:n_done]:
        before = after(before, op)
    possible = [before]
    outcome = Outcome()
    if n_done < len(ops):
        outcome.op = ops[n_done]
        possible.append(after(before, ops[n_done]))
    root = make_root(folder)
    found = read_all(root)
    assert found in possible, f"{ops[n_done : n_done + 1]}: {found} is none of {possible}"
    if possible[0] != possible[-1]:
        outcome.is_done = found == possible[1]
    elif outcome.op and outcome.op[0] == "export":
        outcome.is_done = check_export(root, folder / f"export {n_done}", found[outcome.op[1]])
    elif outcome.op and outcome.op[0] == "compact" and (folder / "before compact").exists():
        memory = Memory(root, root.find(outcome.op[1]))
        outcome.is_done = places(memory) != json.loads((folder / "before compact").read_text())
        memory.close()
    check_no_leak(root, found)
    return outcome


def n_acknowledged(log: Path) -> int:
    """Operations that were done when the process ended."""
    return len(log.read_text().split()) if log.exists() else 0


def check_pair(folder: Path, first: list[Op], beside: dict[str, list[Op]]) -> list[Outcome]:
    """As check_after, for two workspaces at work at once -> one outcome for each."""
    if n_acknowledged(folder / "log") < len(first):
        return [check_after(folder, first)]
    start: State = {}
    for op in first:
        start = after(start, op)
    root = make_root(folder)
    found = read_all(root)
    assert set(found) == set(beside)
    outcomes = []
    for name, ops in beside.items():
        n_done = n_acknowledged(folder / f"log {name}")
        before = start
        for op in ops[:n_done]:
            before = after(before, op)
        outcome = Outcome()
        possible = [before[name]]
        if n_done < len(ops):
            outcome.op = ops[n_done]
            possible.append(after(before, outcome.op)[name])
        assert found[name] in possible, f"{name}: {found[name]} is none of {possible}"
        if possible[0] != possible[-1]:
            outcome.is_done = found[name] == possible[1]
        outcomes.append(outcome)
    check_no_leak(root, found)
    return outcomes


# -- many of them


@dataclass
class Tally:
    """How often which point ended a process, and whether what was under way was there afterwards."""

    points: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[bool | None] = field(default_factory=Counter)

    @property
    def n_kills(self) -> int:
        return self.points.total()

    def is_enough(self, group: str, n_kills: int) -> bool:
        """So many kills, every point of the group and every outcome that it can have among them."""
        has_both = group not in BOTH or {True, False} <= self.outcomes.keys()
        return set(self.points) == set(GROUPS[group]) and has_both and self.n_kills >= n_kills


def kill_often(server: Server, group: str, folder: Path, rng: random.Random, n_kills: int) -> Tally:
    """Kills processes at the points of a group, and checks what they leave, until that is enough.

    folder: for one case after the other; not there yet.
    """
    tally = Tally()
    for case in range(max(20 * n_kills, 400)):
        if tally.is_enough(group, n_kills):
            return tally
        point = GROUPS[group][case // 2 % len(GROUPS[group])]
        beside: dict[str, list[Op]] | None = None
        if group in BESIDE and case % 2:
            ops, beside = make_pair(rng.randrange(1 << 30))
        else:
            ops = make_script(rng.randrange(1 << 30), group)
        folder.mkdir()
        nth = rng.randrange(1, 25 if group in OFTEN else 5)
        while nth and not server.run(folder, ops, point, nth, beside):
            passed = json.loads((folder / "points.json").read_text()).get(point, 0)
            nth = rng.randrange(1, passed + 1) if passed else 0  # a script that never comes here is left out
            shutil.rmtree(folder)
            folder.mkdir()
        if nth:
            tally.points[point] += 1
            outcomes = check_pair(folder, ops, beside) if beside else [check_after(folder, ops)]
            tally.outcomes.update(outcome.is_done for outcome in outcomes)
        shutil.rmtree(folder)
    raise AssertionError(f"not every point was met with every outcome: {tally}")


def read_all(root: Root) -> State:
    """Tokens of all workspaces; every record and index row is checked."""
    found: State = {}
    for family in root.family_ids():
        report = verify_family(root, family)
        wrong = [f for f in report.findings if f.kind != "file"]
        assert not wrong, wrong
    for item in root.list():
        assert item.row is not None, item.error
        memory = Memory(root, item.place)
        memory.check()
        memory.check_index()
        tokens = memory.tokens[: memory.n_complete * BLOCK]
        for read in memory.ahead:
            assert (read.start, len(read.ids)) == (len(tokens), BLOCK)
            tokens = tokens + read.ids.tolist()
            np.testing.assert_array_equal(memory.store.get(read.ref), record_of(tokens, BLOCK))
        found[item.row.name] = memory.tokens
        memory.close()
    return found


def check_no_leak(root: Root, found: State) -> None:
    """After one more step and `compact`, nothing is kept that is not needed, and no file is left over."""
    root.create("one more", make_binding())
    for family in root.family_ids():
        with root.family(family) as opened:
            place = next(iter(root._scan_family(family))).place
            owners = len(opened.workspaces())
        with Holding.open(root, place) as holding:
            records = open_records(holding)
            compact(holding, records)
            records.close()
            with holding.family.catalog.snapshot() as db:
                n_used = sum(row.used > 0 for row in SLOTS.rows(db))
                n_slots = sum(row.n_slots for row in SEGMENTS.rows(db))
        report = verify_family(root, family)
        assert report.is_sound, report.findings
        assert report.n_records == n_used
        assert n_slots <= n_used + 4 * 2 * owners, (n_slots, n_used, owners)
    with suppress(KvmemError):
        delete_workspace(root, root.find("one more"))
    assert not [path for path in root.folder.iterdir() if path.name.startswith(".")]
    for name, tokens in found.items():
        memory = Memory(root, root.find(name))
        memory.check(tokens)
        memory.step([1, 2, 3, 4, 5])
        memory.close()
        memory = Memory(root, memory.place)
        memory.check([*tokens, 1, 2, 3, 4, 5])
        memory.close()


def check_export(root: Root, path: Path, tokens: list[int]) -> bool:
    """-> whether the file is there; if it is, it is whole."""
    if not path.exists():
        return False
    try:
        place = import_workspace(root, path, "imported", segment_records=4)
    except StoreError as error:
        raise AssertionError(f"half an export: {error}") from error
    memory = Memory(root, place)
    memory.check(tokens)
    memory.close()
    delete_workspace(root, place)
    return True

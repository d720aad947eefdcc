"""Workspaces whose process is killed at a named point of the store's work, and what must be true afterwards.

A server process forks one child for each case: the child runs a script of operations and kills itself where
it is told to. What it has finished it writes to a log, so that the parent knows what was acknowledged.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
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


KINDS = ("truncate", "fork", "delete", "compact", "export", "import", "ahead", "rename", "create")


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
        self.points: dict[str, int] = {}

    def at(self, point: str) -> None:
        self.points[point] = self.points.get(point, 0) + 1
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def run_script(folder: Path, ops: list[Op], files: Killer) -> None:
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
                compact(opened(name).holding, opened(name).store)
            case "ahead":
                opened(name).read_ahead(op[2])
            case "export":
                export_workspace(opened(name).holding, opened(name).store, folder / f"export {number}")
            case "import":
                export_workspace(opened(name).holding, opened(name).store, folder / f"export {number}")
                import_workspace(root, folder / f"export {number}", op[2], segment_records=4)
        os.write(log, f"{number}\n".encode())
    for name in list(open_ones):
        closed(name)


def serve() -> None:
    """Reads cases as lines of JSON; answers with how each one ended."""
    for line in sys.stdin:
        case = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                files = Killer(case["point"], case["nth"])
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

    def run(self, folder: Path, ops: list[Op], point: str, nth: int) -> bool:
        """-> whether the child was killed where it was told to; else the script came to its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        case = {"folder": str(folder), "ops": ops, "point": point, "nth": nth}
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
    log = folder / "log"
    n_done = len(log.read_text().split()) if log.exists() else 0
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
    check_no_leak(root, found)
    return outcome


def read_all(root: Root) -> State:
    """Tokens of all workspaces; every record and index row is checked."""
    found: State = {}
    for family in root.family_ids():
        report = verify_family(root, family)
        wrong = [f for f in report.findings if f.kind not in ("file", "index")]
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

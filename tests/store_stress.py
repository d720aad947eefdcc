"""Processes at work on the workspaces of one family at once: python store_stress.py FOLDER SECONDS."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from durable_run import Memory, make_memory, make_root

from kvmem_llama.errors import StoreLocked
from kvmem_llama.store.compact import compact
from kvmem_llama.store.deleting import delete_workspace
from kvmem_llama.store.export import export_workspace
from kvmem_llama.store.importing import import_workspace
from kvmem_llama.store.names import Place
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root

N_WRITERS = 3  # processes with one workspace each
N_TOGETHER = 2  # workspaces of one more process, each with a thread


def opened(root: Root, place: Place) -> Memory:
    """Waits while a compaction has the workspace."""
    while True:
        with contextlib.suppress(StoreLocked):
            return Memory(root, place)


def delete(root: Root, place: Place) -> None:
    while True:
        with contextlib.suppress(StoreLocked):
            return delete_workspace(root, place)


def write(folder: Path, root: Root, number: int, end: float) -> None:
    """Everything a writer can do, on a workspace of its own and forks of it."""
    rng = random.Random(number)
    memory = opened(root, root.find(f"fork {number}"))
    n = 0
    while time.monotonic() < end:
        n += 1
        match rng.choices(
            ["step", "truncate", "fork", "compact", "open", "ahead", "export"], [50, 15, 10, 5, 5, 5, 5]
        )[0]:
            case "step":
                memory.step([rng.randrange(9) for _ in range(rng.randrange(1, 9))])
            case "truncate":
                memory.truncate(rng.randrange(len(memory.tokens) + 1))
            case "fork":
                fork = memory.fork(f"{number} {n}")
                fork.step([1] * 5)
                fork.check()
                fork.close()
                delete(root, fork.place)
            case "compact":
                compact(memory.holding, memory.store)
            case "open":
                memory.close()
                memory = opened(root, memory.place)
            case "ahead":
                memory.read_ahead([rng.randrange(9) for _ in range(9)])
            case "export":
                path = folder / f"export {number}"
                export_workspace(memory.holding, memory.store, path, replace=True)
                delete(root, import_workspace(root, path, f"imported {number} {n}"))
        if n % 5 == 0:
            memory.check()
    memory.check()
    memory.close()
    assert n > 10, f"only {n} operations"


def write_together(folder: Path, numbers: range, end: float) -> None:
    """Writers that share a process, and what it has open."""
    root = make_root(folder)
    with ThreadPoolExecutor(len(numbers)) as threads:
        done = [threads.submit(write, folder, root, number, end) for number in numbers]
    for one in done:
        one.result()


def look(folder: Path, end: float) -> None:
    """Verifies and reads while the others write."""
    root = make_root(folder)
    family = root.find("base").family
    while time.monotonic() < end:
        report = verify_family(root, family)
        assert report.is_sound, report.findings
        Memory(root, root.find("fork 0"), read_only=True).close()


def main(folder: Path, seconds: float) -> int:
    root = make_root(folder)
    memory = make_memory(root, "base", 37)
    for number in range(N_WRITERS + N_TOGETHER):
        memory.fork(f"fork {number}").close()
    memory.close()
    end = time.monotonic() + seconds
    jobs: list[Callable[[], None]] = [
        *(
            lambda number=number: write(folder, make_root(folder), number, end)  # type: ignore[misc]
            for number in range(N_WRITERS)
        ),
        lambda: write_together(folder, range(N_WRITERS, N_WRITERS + N_TOGETHER), end),
        lambda: look(folder, end),
    ]
    children = []
    for job in jobs:
        child = os.fork()
        if child == 0:
            try:
                job()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    for family in root.family_ids():
        report = verify_family(root, family)
        assert report.is_sound, report.findings
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))

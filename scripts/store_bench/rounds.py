"""Alternating timed rounds of several actions in one process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def environment() -> dict[str, str]:
    """Of a process that runs a module of this folder's package."""
    path = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def drop_page_cache(folder: Path) -> None:
    """Drops the clean pages of all files of a folder (posix_fadvise DONTNEED)."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def rounds(
    actions: Mapping[str, Callable[[], None]], n_rounds: int, before: Callable[[], None], title: str
) -> dict[str, list[float]]:
    """Seconds of every action in every round; who goes first changes. One round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for i in range(n_rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            before()
            began = time.perf_counter()
            actions[name]()
            if i:
                times[name].append(time.perf_counter() - began)
        print(f"\r{title}: round {i}/{n_rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return times

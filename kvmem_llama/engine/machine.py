"""What this machine has: cores and free memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def physical_cores() -> int:
    """Cores this process may run on, each counted once however many threads it has."""
    usable: Iterable[int] = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    return max(len({_core(cpu) for cpu in usable}), 1)


def _core(cpu: int) -> str:
    """Names the core of a logical CPU; the CPU's own number where the system does not tell."""
    siblings = _read(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
    return siblings or str(cpu)


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of RAM, or the limit of this control group if that is less; 1 GiB where nobody tells.

    root: as of `free_memory`.
    """
    bounds = []
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            bounds.append(int(value.split()[0]) * 1024)
    limit = _read(root / "sys/fs/cgroup/memory.max")
    if limit.isdigit():
        bounds.append(int(limit))
    return min(bounds, default=2**30)


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without swapping, within the limit of this control group; None: unknown.

    root: where proc and sys are, for tests.
    """
    bounds = []
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            bounds.append(int(value.split()[0]) * 1024)
    group = root / "sys/fs/cgroup"
    limit, used = _read(group / "memory.max"), _read(group / "memory.current")
    if limit.isdigit() and used.isdigit():
        bounds.append(int(limit) - int(used) + _file_cache(group))
    return max(min(bounds), 0) if bounds else None


def _file_cache(group: Path) -> int:
    """Bytes of the group's use that are only cached files."""
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "file":
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""

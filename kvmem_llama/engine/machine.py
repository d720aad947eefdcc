"""What this machine has: cores, free memory, free disk space, GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_REPACKED: Final = {
    "avx2": ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4"),
    "avx512f": ("Q2_K",),
    "asimddp": ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4", "Q8_0"),
}
"""By feature of the CPU: types of weights that llama.cpp keeps a second time, in the order in which its loops
read them (ggml/src/ggml-cpu/repack.cpp)."""


SHARE_OF_RAM: Final = 4
"""Records of durable workspaces get this part of the RAM where nothing says less."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver tells it. Sizes in bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What a process may use. Sizes in bytes."""

    total: int  # RAM, or the limit of the control group
    free: int | None  # can be allocated without swapping; None: not known
    disk_free: int  # where durable workspaces lie
    cores: int
    is_limited: bool = False  # a control group (container) allows less than the machine has
    repacked: frozenset[str] = frozenset()  # types of weights that are kept a second time
    gpus: tuple[Gpu, ...] = ()


def this_machine(folder: Path, gpus: Iterable[Gpu] = (), root: Path = Path("/")) -> Machine:
    """What there is now. folder: of durable workspaces; it need not exist. root: as of `free_memory`."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    flags, total = _cpu_flags(root), total_memory(root)
    return Machine(
        total=total,
        free=free_memory(root),
        disk_free=shutil.disk_usage(there).free,
        cores=physical_cores(),
        is_limited=total < _meminfo(root, "MemTotal", 0),
        repacked=frozenset(name for flag in flags & _REPACKED.keys() for name in _REPACKED[flag]),
        gpus=tuple(gpus),
    )


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
    bounds = [limit for limit, _ in _groups(root)]
    if ram := _meminfo(root, "MemTotal", 0):
        bounds.append(ram)
    return min(bounds, default=2**30)


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without swapping, within the limits of this process's control groups; None:
    unknown.

    root: where proc and sys are, for tests.
    """
    bounds = [limit - used for limit, used in _groups(root)]
    if (available := _meminfo(root, "MemAvailable", -1)) >= 0:
        bounds.append(available)
    return max(min(bounds), 0) if bounds else None


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used without cached files) of every control group whose limit counts, of either version of
    control groups. In a container its own is at the top."""
    top = root / "sys/fs/cgroup"
    for line in [*_read(root / "proc/self/cgroup").splitlines(), "0::/"]:
        number, _, rest = line.partition(":")
        kinds, _, own = rest.partition(":")
        parts = [part for part in own.split("/") if part not in ("", "..")]
        if number == "0":
            folder, names = top, ("memory.max", "memory.current", "file")
        elif "memory" in kinds.split(","):
            folder, names = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
        else:
            continue
        for n in range(len(parts) + 1):
            group = folder.joinpath(*parts[:n])
            limit, used = _read(group / names[0]), _read(group / names[1])
            if limit.isdigit() and used.isdigit():
                yield int(limit), int(used) - _stat(group, names[2])


def _meminfo(root: Path, wanted: str, default: int) -> int:
    """A line of /proc/meminfo in bytes."""
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    return default


def _cpu_flags(root: Path) -> set[str]:
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def _stat(group: Path, wanted: str) -> int:
    """A line of memory.stat: bytes."""
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == wanted:
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""

from __future__ import annotations

from pathlib import Path

from kvmem_llama.engine.machine import free_memory, physical_cores


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_there_is_at_least_one_core() -> None:
    assert physical_cores() >= 1


def test_free_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo="MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    assert free_memory(tmp_path) == 3000 * 1024


def test_a_control_group_may_allow_less_and_its_cached_files_count_as_free(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo="MemAvailable: 3000 kB\n")
    group = {"memory.max": "1000000", "memory.current": "900000", "memory.stat": "anon 1\nfile 300000\n"}
    write(tmp_path, **{f"sys/fs/cgroup/{name}": text for name, text in group.items()})
    assert free_memory(tmp_path) == 400000


def test_an_unlimited_group_and_an_unknown_system_set_no_bound(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    write(tmp_path, **{"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"})
    assert free_memory(tmp_path) is None

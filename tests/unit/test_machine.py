from __future__ import annotations

from pathlib import Path

from kvmem_llama.engine.machine import free_memory, physical_cores, this_machine, total_memory
from kvmem_llama.native.devices import gpu_memory


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


def test_groups_above_and_of_the_first_version_count_too(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo="MemTotal: 8000 kB\nMemAvailable: 7000 kB\n")
    assert total_memory(tmp_path) == 8000 * 1024
    write(tmp_path, proc__self__cgroup="0::/user/app\n")
    for group, limit, used in (("user", "3000000", "1000000"), ("user/app", "max", "5")):
        files = {"memory.max": limit, "memory.current": used}
        write(tmp_path, **{f"sys/fs/cgroup/{group}/{name}": text for name, text in files.items()})
    assert (total_memory(tmp_path), free_memory(tmp_path)) == (3_000_000, 2_000_000)
    write(tmp_path, proc__self__cgroup="4:cpu,memory:/app\n")
    files = {"limit_in_bytes": "900000", "usage_in_bytes": "500000", "stat": "cache 1\ntotal_cache 100000\n"}
    write(tmp_path, **{f"sys/fs/cgroup/memory/app/memory.{name}": text for name, text in files.items()})
    assert (total_memory(tmp_path), free_memory(tmp_path)) == (900_000, 500_000)


def test_a_machine_is_what_its_files_say(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemTotal: 8000 kB\nMemAvailable: 7000 kB\n",
        proc__cpuinfo="processor : 0\nflags\t\t: fpu avx2 fma\n",
        **{"sys/fs/cgroup/memory.max": "4000000", "sys/fs/cgroup/memory.current": "1000000"},
    )
    machine = this_machine(tmp_path / "not" / "made", root=tmp_path)
    assert (machine.total, machine.free, machine.is_limited) == (4_000_000, 3_000_000, True)
    assert "Q4_K" in machine.repacked and "Q6_K" not in machine.repacked
    assert machine.disk_free > 0 and machine.cores == physical_cores() and machine.gpus == ()
    assert not (tmp_path / "not").exists()


def test_a_library_that_cannot_be_asked_has_no_gpus(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"no library")
    assert gpu_memory(tmp_path / "lib.so") == gpu_memory(tmp_path / "missing.so") == []

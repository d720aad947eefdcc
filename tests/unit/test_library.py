"""The handshake takes the library this package was built with, and says why it refuses any other."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvmem_llama.errors import LibraryMismatch, LibraryMissing
from kvmem_llama.native import library
from kvmem_llama.native.binding import late_package, version_of
from kvmem_llama.native.cdef import ABI_VERSION, CDEF

REPO = Path(__file__).resolve().parents[2]

SOURCE = """
#include <cstdint>
#include <cstring>
extern "C" {
struct kvmem_params { int32_t n_rows; int32_t block_size; };
size_t ggml_backend_reg_count(void) { return N_BACKENDS; }
void ggml_backend_load_all_from_path(const char *) {}
#ifdef ABI
int32_t kvmem_abi_version(void) { return ABI; }
const char * kvmem_patch_id(void) { return "0123456789abcdef"; }
int64_t kvmem_struct_size(const char * name) { return std::strcmp(name, "kvmem_params") ? -1 : SIZE; }
#endif
}
"""

SMALL_CDEF = """
struct kvmem_params { int32_t n_rows; int32_t block_size; };
struct llama_kvmem;
int32_t kvmem_abi_version(void);
const char * kvmem_patch_id(void);
int64_t kvmem_struct_size(const char * name);
"""

BINDING = """
import ctypes, pathlib
_folder = pathlib.Path(__file__).parent / "lib"
if not (_folder / "libllama.so").exists():
    raise FileNotFoundError("Shared library with base name 'llama' not found")
_lib = ctypes.CDLL(str(_folder / "libllama.so"))
"""

Fake = Callable[..., Path]


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """Compiles a stand-in for libllama: fake(abi=None) is a stock one."""

    def build(abi: int | None = ABI_VERSION, size: int = 8, n_backends: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("fake")
        (folder / "fake.cpp").write_text(SOURCE)
        flags = [f"-DSIZE={size}", f"-DN_BACKENDS={n_backends}"] + ([] if abi is None else [f"-DABI={abi}"])
        out = folder / "libllama.so"
        compiler = os.environ.get("CXX", "c++")
        subprocess.run(
            [compiler, "-shared", "-fPIC", *flags, str(folder / "fake.cpp"), "-o", str(out)], check=True
        )
        return out

    return build


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder first on the import path that holds a stand-in for llama_cpp, without a library."""
    package = tmp_path / "site" / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text(f'__version__ = "{library.BINDING_VERSION}"\n')
    (package / "llama_cpp.py").write_text(BINDING)
    for name in [name for name in sys.modules if name.partition(".")[0] == "llama_cpp"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(library, "CDEF", SMALL_CDEF)
    monkeypatch.setattr(library, "PATCH_ID_FILE", tmp_path / "patch_id.txt")
    library.load.cache_clear()
    yield package.parent
    library.load.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "llama_cpp"]:
        del sys.modules[name]


def test_the_right_library_is_taken(fake: Fake) -> None:
    path = fake()
    native = library.open_library(path, SMALL_CDEF, "0123456789abcdef")
    assert native.path == path
    assert native.patch_id == "0123456789abcdef"
    assert native.lib.kvmem_abi_version() == ABI_VERSION


def test_a_source_checkout_without_patch_id_takes_any_build(fake: Fake) -> None:
    assert library.open_library(fake(), SMALL_CDEF, None).patch_id == "0123456789abcdef"


def test_a_stock_library_is_refused(fake: Fake) -> None:
    with pytest.raises(
        LibraryMismatch, match=r"is a stock llama\.cpp library, without kvmem_llama's hooks"
    ) as e:
        library.open_library(fake(abi=None), SMALL_CDEF, None)
    assert e.value.hint


def test_another_abi_version_is_refused_with_both_numbers(fake: Fake) -> None:
    with pytest.raises(LibraryMismatch, match=f"has ABI version 99, this package needs {ABI_VERSION}"):
        library.open_library(fake(abi=99), SMALL_CDEF, None)


def test_the_library_of_another_build_is_refused_with_both_patch_ids(fake: Fake) -> None:
    with pytest.raises(
        LibraryMismatch, match="patch id is 0123456789abcdef, this package has fedcba9876543210"
    ):
        library.open_library(fake(), SMALL_CDEF, "fedcba9876543210")


def test_a_struct_of_another_size_is_refused_with_both_sizes(fake: Fake) -> None:
    with pytest.raises(LibraryMismatch, match="struct kvmem_params has 12 bytes there and 8 here"):
        library.open_library(fake(size=12), SMALL_CDEF, None)


def test_a_library_that_lacks_a_function_is_refused_by_its_name(fake: Fake) -> None:
    with pytest.raises(LibraryMismatch, match="is stale: it lacks kvmem_new_call"):
        library.open_library(fake(), SMALL_CDEF + "int32_t kvmem_new_call(void);", None)


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "libllama.so"
    broken.write_bytes(b"\x7fELF cut short")
    with pytest.raises(LibraryMissing, match="cannot be opened") as e:
        library.open_library(broken, SMALL_CDEF, None)
    assert str(broken) in str(e.value)


def test_load_opens_the_very_file_that_llama_cpp_loaded(fake: Fake, site: Path) -> None:
    path = fake()
    (site / "llama_cpp" / "lib" / "libllama.so").symlink_to(path)
    native = library.load()
    assert native.path == path
    assert library.load() is native


def test_no_library_is_said_with_the_folder_looked_in(site: Path) -> None:
    with pytest.raises(LibraryMissing, match="libllama is missing") as e:
        library.load()
    assert str(site / "llama_cpp") in str(e.value)


def test_no_llama_cpp_at_all_is_said_with_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LibraryMissing, match=r"files that kvmem_llama installs are missing.*pip install"):
        library.import_binding()


def test_a_dependency_that_llama_cpp_lacks_is_named(site: Path) -> None:
    (site / "llama_cpp" / "llama_cpp.py").write_text("import no_such_package_here\n")
    with pytest.raises(LibraryMissing, match="needs the Python package 'no_such_package_here'"):
        library.load()


def test_a_binding_of_another_version_is_refused_and_the_package_that_brought_it_named(
    fake: Fake, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "llama_cpp" / "lib" / "libllama.so").symlink_to(fake())
    (site / "llama_cpp" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(LibraryMismatch, match=r"version 0\.2\.0.*pip uninstall llama-cpp-python") as e:
        library.load()
    assert str(site / "llama_cpp") in str(e.value)


def test_a_llama_cpp_that_hides_ours_is_named_with_both_folders(
    fake: Fake, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    (own / "llama_cpp").mkdir(parents=True)
    monkeypatch.setattr(library, "PACKAGE", own / "kvmem_llama")
    (site / "llama_cpp" / "lib" / "libllama.so").symlink_to(fake(abi=None))
    with pytest.raises(LibraryMismatch) as e:
        library.load()
    assert f"Python finds {site / 'llama_cpp'} before ours in {own / 'llama_cpp'}" in str(e.value)


def test_a_second_instance_in_the_process_is_refused(fake: Fake, site: Path, tmp_path: Path) -> None:
    (site / "llama_cpp" / "lib" / "libllama.so").symlink_to(fake())
    binding = library.import_binding()
    binding._lib._name = str(fake())
    with pytest.raises(LibraryMismatch, match="two instances"):
        library.load()


def test_a_folder_without_backends_is_named(fake: Fake) -> None:
    path = fake(n_backends=0)
    with pytest.raises(LibraryMissing, match="holds no ggml backend") as e:
        library.load_backends(path)
    assert str(path.parent) in str(e.value)


def test_the_patch_id_of_the_build_is_expected_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "PATCH_ID_FILE", tmp_path / "patch_id.txt")
    assert library.expected_patch_id() is None
    (tmp_path / "patch_id.txt").write_text("0123456789abcdef\n")
    assert library.expected_patch_id() == "0123456789abcdef"


def test_the_binding_version_is_the_pinned_one() -> None:
    pin = tomllib.loads((REPO / "vendor" / "pin.toml").read_text())
    assert pin["version"] == library.BINDING_VERSION


def _load_elsewhere(**environment: str) -> subprocess.CompletedProcess[str]:
    code = (
        "from kvmem_llama.errors import KvmemError\n"
        "from kvmem_llama.native.library import load\n"
        "try: n = load(); print(n.path, n.patch_id)\n"
        "except KvmemError as e: print(type(e).__name__, e)\n"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )


def test_the_installed_library_passes_its_own_handshake() -> None:
    native = library.load()
    assert native.path.name.startswith("libllama")
    assert library.expected_patch_id() in (None, native.patch_id)
    assert [name for name in dir(native.lib) if "kvmem" in name]
    assert "kvmem_abi_version" in CDEF


def test_the_unpatched_library_is_refused_in_a_fresh_process(stock_lib: Path) -> None:
    said = _load_elsewhere(LLAMA_CPP_LIB_PATH=str(stock_lib)).stdout
    assert said.startswith("LibraryMismatch")
    assert str(stock_lib.resolve()) in said
    assert "is a stock llama.cpp library" in said
    assert "LLAMA_CPP_LIB_PATH leads there: unset it" in said


_SPINNING = """import os
from kvmem_llama.native.library import load
load()
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_waiting_threads_sleep_soon_unless_somebody_says_how(given: dict[str, str], spins: str) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", _SPINNING], env=kept | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [spins]


def test_a_late_package_runs_when_a_name_of_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "late_example"
    folder.mkdir()
    (folder / "__init__.py").write_text('__version__ = "7.1"\nfrom .part import x\nran = [x]\n')
    (folder / "part.py").write_text("x = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = late_package("late_example")
    assert importlib.import_module("late_example.part").x == 5 and "ran" not in vars(package)
    assert version_of(package) == "7.1" and not hasattr(package, "__wrapped__") and "ran" not in vars(package)
    assert importlib.import_module("late_example") is package and package.ran == [5]
    assert version_of(package) == "7.1" and late_package("late_example") is package
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing
    with pytest.raises(ModuleNotFoundError):
        late_package("late_example_that_is_not_there")
    monkeypatch.delitem(sys.modules, "late_example")
    monkeypatch.delitem(sys.modules, "late_example.part")

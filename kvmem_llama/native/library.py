"""Finds and loads the patched libllama, once per process, and refuses any other.

Standard calls go through the `llama_cpp` package (ctypes), ours through cffi. Both must mean the same file: a
second copy of the library would be a second instance with its own state, and objects of one are poison to the
other. So `llama_cpp` loads it first, and cffi opens the real path of what it loaded.

A stock library, or one of another build, would accept most calls and do the wrong thing. The handshake
compares ABI version, patch id (that of the build this package came from) and the size of every struct before
anything else is called.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ..errors import LibraryMismatch, LibraryMissing
from ..settings import wait_politely
from .binding import late_package, version_of
from .cdef import ABI_VERSION, CDEF
from .declarations import UNUSABLE, declared, has
from .once import Once
from .stock_cdef import STOCK_CDEF

BINDING_VERSION: Final = (
    "0.3.36"  # of the llama_cpp Python files: their ctypes structs are those of the pinned source
)
PACKAGE: Final = Path(__file__).resolve().parents[1]
PATCH_ID_FILE: Final = PACKAGE / "_lib" / "patch_id.txt"  # written by the build; a source checkout has none

_REINSTALL: Final = "run `pip install --force-reinstall --no-deps .` in the kvmem_llama source tree"


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded libllama. `ffi` holds the types of native/cdef.py, `lib` its functions."""

    ffi: Any  # cffi.FFI
    lib: Any
    path: Path  # real path of the file that llama_cpp loaded
    patch_id: str


@Once
def load() -> NativeLibrary:
    """The patched libllama, loaded through llama_cpp on the first call.

    Raises LibraryMissing if there is no library or no llama_cpp, LibraryMismatch if it is not the one this
    package was built with.
    """
    binding = import_binding()
    path = Path(binding._lib._name).resolve()
    native = open_library(path, CDEF, expected_patch_id())
    ours = int(native.ffi.cast("uintptr_t", native.ffi.addressof(native.lib, "kvmem_abi_version")))
    theirs = ctypes.cast(binding._lib.kvmem_abi_version, ctypes.c_void_p).value
    if ours != theirs:
        raise LibraryMismatch(
            f"two instances of {path} are loaded in this process",
            hint="Import kvmem_llama before any other package that loads llama.cpp.",
        )
    load_backends(path)
    return native


def expected_patch_id() -> str | None:
    """Patch id of the library built with this package; None in a source checkout that was not built."""
    return PATCH_ID_FILE.read_text(encoding="ascii").strip() if PATCH_ID_FILE.is_file() else None


def import_binding() -> ModuleType:
    """The module llama_cpp.llama_cpp, which loads libllama when imported.

    Raises LibraryMissing or LibraryMismatch; both name the llama_cpp that was found.
    """
    found = binding_folder()
    if found is None:
        raise LibraryMissing(
            "the llama_cpp files that kvmem_llama installs are missing",
            hint=f"To restore them, {_REINSTALL}.",
        )
    wait_politely()
    try:
        package = late_package("llama_cpp")
        module = importlib.import_module("llama_cpp.llama_cpp")
    except ModuleNotFoundError as error:
        raise LibraryMissing(
            f"llama_cpp in {found} needs the Python package {error.name!r}, which is not installed",
            hint=f"Run `pip install {error.name}`.",
        ) from error
    except FileNotFoundError as error:
        raise LibraryMissing(
            f"libllama is missing: llama_cpp in {found} found none", hint=_hint(found)
        ) from error
    except (RuntimeError, OSError) as error:
        raise LibraryMissing(f"libllama cannot be loaded: {error}", hint=_hint(found)) from error
    except AttributeError as error:
        raise LibraryMismatch(
            f"llama_cpp in {found} and its libllama differ: {error}", hint=_hint(found)
        ) from error
    version = version_of(package)
    if version != BINDING_VERSION:
        raise LibraryMismatch(
            f"llama_cpp in {found} is version {version}, kvmem_llama needs its own {BINDING_VERSION}",
            hint=_hint(found),
        )
    return module


def binding_folder() -> Path | None:
    """Folder of the llama_cpp package that Python would import; None if there is none."""
    spec = importlib.util.find_spec("llama_cpp")
    return Path(spec.origin).resolve().parent if spec and spec.origin else None


def open_library(path: Path, cdef: str, patch_id: str | None) -> NativeLibrary:
    """cffi handle on the library at `path` after the handshake.

    cdef: C declarations; must hold kvmem_abi_version, kvmem_patch_id and kvmem_struct_size.
    patch_id: the id it must have; None accepts any.
    Raises LibraryMissing (cannot be opened) or LibraryMismatch (stock, stale, other ABI).
    """
    ffi = declared(cdef)
    try:
        lib = ffi.dlopen(str(path))
    except OSError as error:
        raise LibraryMissing(f"{path} cannot be opened: {error}", hint=_hint(path.parent)) from error
    return NativeLibrary(ffi=ffi, lib=lib, path=path, patch_id=handshake(ffi, lib, path, patch_id))


def handshake(ffi: Any, lib: Any, path: Path, patch_id: str | None) -> str:
    """Patch id of `lib`. Raises LibraryMismatch unless it is the library this package was built with."""

    def mismatch(what: str) -> LibraryMismatch:
        return LibraryMismatch(f"{path} {what}", hint=_hint(path.parent))

    if not has(lib, "kvmem_abi_version"):
        raise mismatch("is a stock llama.cpp library, without kvmem_llama's hooks")
    abi = int(lib.kvmem_abi_version())
    if abi != ABI_VERSION:
        raise mismatch(f"has ABI version {abi}, this package needs {ABI_VERSION}")
    found: str = ffi.string(lib.kvmem_patch_id()).decode("ascii", "replace")
    if patch_id is not None and found != patch_id:
        raise mismatch(f"is from another build: its patch id is {found}, this package has {patch_id}")
    absent = [name for name in dir(lib) if not has(lib, name)]
    if absent:
        raise mismatch(f"is stale: it lacks {', '.join(absent)}")
    for name in ffi.list_types()[1]:
        here = _size(ffi, f"struct {name}")
        if here is None:  # opaque: only pointers to it cross the border
            continue
        there = int(lib.kvmem_struct_size(name.encode()))
        if there != here:
            raise mismatch(f"is stale: struct {name} has {there} bytes there and {here} here")
    return found


def _size(ffi: Any, struct: str) -> int | None:
    """Bytes; None of an opaque struct."""
    try:
        return int(ffi.sizeof(struct))
    except UNUSABLE:
        return None


def load_backends(path: Path) -> None:
    """Register ggml's backends from the folder of the library, if none is compiled into it (portable builds).

    ggml itself would look beside the Python executable and in the working directory.
    """
    lib = declared(STOCK_CDEF).dlopen(str(path))
    if lib.ggml_backend_reg_count() == 0:
        lib.ggml_backend_load_all_from_path(str(path.parent).encode())
    if lib.ggml_backend_reg_count() == 0:
        raise LibraryMissing(f"{path.parent} holds no ggml backend (libggml-cpu*)", hint=_hint(path.parent))


def _hint(used: Path) -> str:
    """What to do about a library in folder `used`: names what displaced ours, if that can be seen."""
    import importlib.metadata  # brings the parsers of mail with it

    own = PACKAGE.parent / "llama_cpp"
    binding = binding_folder()
    try:
        other = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        other = ""
    if other:
        return (
            f"The package llama-cpp-python {other} is installed and uses the same folder name: "
            f"run `pip uninstall llama-cpp-python`, then {_REINSTALL}."
        )
    if binding is not None and own.is_dir() and binding != own:
        return f"Python finds {binding} before ours in {own}: remove it, or take it off the path."
    if binding is not None and used not in (binding, binding / "lib"):
        return "The variable LLAMA_CPP_LIB_PATH leads there: unset it."
    return f"To replace it, {_REINSTALL}."

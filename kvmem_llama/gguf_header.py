"""Reads the header of a GGUF file: metadata and tensor table, never tensor data.

Format: ggml/docs/gguf.md and ggml/src/gguf.cpp of llama.cpp. The file is not trusted: every length is checked
against the bytes left before anything is read, and what is kept in memory is bounded whatever the file says.
"""

from __future__ import annotations

import functools
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from .errors import ModelCorrupt, ModelNotFound
from .gguf_texts import starts_of

Scalar = int | float | bool | str

# Far above any real model, far below what would exhaust memory or patience.
MAX_KEYS: Final = 65_536
MAX_TENSORS: Final = 65_536
MAX_ELEMENTS: Final = 8_388_608  # elements of all arrays of strings together: they are walked one by one
MAX_KEPT_TEXT: Final = 1 << 20  # bytes of one string; the rest of a longer one is passed over
MAX_KEPT_ARRAY: Final = 4_096  # elements; a longer array is known by its length alone
MAX_KEPT: Final = 64 << 20  # bytes of all kept values together, with what Python adds to each
PER_VALUE: Final = 64  # bytes Python adds, about
MAX_NAME: Final = 64  # GGML_MAX_NAME
DEFAULT_ALIGNMENT: Final = 32
_CHUNK: Final = 1 << 20  # bytes

_TYPES: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9

# ggml type number -> (name, elements of one block, bytes of one block); ggml/src/ggml-common.h
GGML_TYPES: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LongArray:
    """Stands for an array too long to keep."""

    length: int


Value = Scalar | tuple[Scalar, ...] | LongArray


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """Where the elements of an array stand in the file."""

    length: int  # elements
    of_strings: bool
    start: int  # bytes from the beginning of the file
    end: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of the tensor table; `offset` and `nbytes` in bytes, from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        n = 1
        for dim in self.shape:
            n *= dim
        return n

    @property
    def type_name(self) -> str:
        """ggml's name of the type; a number for a type this version does not know."""
        return GGML_TYPES[self.type_id][0] if self.type_id in GGML_TYPES else f"type {self.type_id}"

    @property
    def nbytes(self) -> int | None:
        """Size of the data; None for a type this version does not know."""
        if self.type_id not in GGML_TYPES:
            return None
        _, block, size = GGML_TYPES[self.type_id]
        return self.n_elements // block * size


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the tensor data."""

    version: int
    metadata: dict[str, Value]
    arrays: dict[str, ArrayPlace]  # of metadata
    tensors: tuple[TensorEntry, ...]
    data_start: int  # bytes
    file_size: int  # bytes


@contextmanager
def open_model_file(path: Path) -> Iterator[BinaryIO]:
    """The file opened for reading. Raises ModelNotFound, also for folders, devices and unreadable files."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ModelNotFound(path, "this is a folder, not a GGUF file")
        if not stat.S_ISREG(mode):
            raise ModelNotFound(path, "not a regular file")
        file = open(path, "rb", buffering=1 << 18)  # noqa: SIM115 (closed below)
    except FileNotFoundError:
        raise ModelNotFound(path) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise ModelNotFound(path, getattr(error, "strerror", None) or str(error)) from None
    with file:
        yield file


def read_header(path: Path) -> GgufHeader:
    """Header of the GGUF file at `path`; its tensor table is checked against the size of the file.

    It is kept for as long as the file does not change: whoever opens a model asks for it more than once.
    Raises ModelNotFound (no such readable file) and ModelCorrupt (not GGUF, damaged, truncated).
    """
    try:
        now = os.stat(path)
    except (OSError, ValueError):
        return _read_header(path, ())  # says what is wrong
    return _read_header(path, (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns))


@functools.lru_cache(maxsize=4)
def _read_header(path: Path, stamp: tuple[int, ...]) -> GgufHeader:
    """stamp: of the file as it is now."""
    with open_model_file(path) as file:
        try:
            header = _Reader(path, file).header()
        except OSError as error:
            raise ModelCorrupt(path, f"reading failed: {error.strerror or error}") from None
    _check_layout(path, header)
    return header


class _Reader:
    """A cursor over the file that refuses to go past its end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._pos = 0
        self._elements_left = MAX_ELEMENTS
        self._kept_left = MAX_KEPT
        self._arrays: dict[str, ArrayPlace] = {}

    def header(self) -> GgufHeader:
        magic = self._file.read(4)
        self._pos = len(magic)
        if magic != b"GGUF":
            raise self._bad(
                "the file is empty" if not magic else f"it starts with {magic!r}, a GGUF file with b'GGUF'"
            )
        version = self._int("I")
        if version not in (2, 3):
            raise self._bad(f"GGUF version {version:#x} is not known (2 and 3 are, little-endian)")
        n_tensors, n_keys = self._int("Q"), self._int("Q")
        if n_keys > MAX_KEYS or n_tensors > MAX_TENSORS:
            raise self._bad(f"its header claims {n_keys} keys and {n_tensors} tensors")
        metadata: dict[str, Value] = {}
        for _ in range(n_keys):
            key = self._text("a key")
            if not key or key in metadata:
                raise self._bad(f"metadata key {key!r:.80} is empty or given twice")
            metadata[key] = self._value(key)
        tensors = tuple(self._tensor() for _ in range(n_tensors))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._bad(f"general.alignment is {alignment!r:.80}, not a power of two")
        data_start = (self._pos + alignment - 1) // alignment * alignment
        return GgufHeader(version, metadata, self._arrays, tensors, data_start, self._size)

    def _bad(self, why: str) -> ModelCorrupt:
        return ModelCorrupt(self._path, why)

    def _need(self, n: int, what: str) -> None:
        if n > self._size - self._pos:
            raise self._bad(f"the file ends inside its header ({what} needs {n} bytes at {self._pos})")

    def _take(self, n: int, what: str) -> bytes:
        self._need(n, what)
        data = self._file.read(n)
        self._pos += len(data)
        if len(data) != n:
            raise self._bad("the file became shorter while it was read")
        return data

    def _skip(self, n: int, what: str) -> None:
        self._need(n, what)
        self._pos += n
        self._file.seek(self._pos)

    def _int(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self._take(struct.calcsize("<" + code), "a number"))[0]
        return value

    def _text(self, what: str) -> str:
        n = self._int("Q")
        self._need(n, what)
        kept = min(n, MAX_KEPT_TEXT)
        self._keep(kept + PER_VALUE)
        data = self._take(kept, what)
        if n > kept:
            self._skip(n - kept, what)
        return data.decode("utf-8", errors="replace")

    def _keep(self, n: int) -> None:
        self._kept_left -= n
        if self._kept_left < 0:
            raise self._bad(f"its metadata takes more than {MAX_KEPT >> 20} MiB")

    def _value(self, key: str) -> Value:
        type_id = self._int("I")
        if type_id != _ARRAY:
            return self._scalar(key, type_id)
        element, length = self._int("I"), self._int("Q")
        start = self._pos
        value = self._array(key, element, length)
        self._arrays[key] = ArrayPlace(length, element == _STRING, start, self._pos)
        return value

    def _array(self, key: str, element: int, length: int) -> Value:
        if element == _STRING:
            self._elements_left -= length
            if self._elements_left < 0:
                raise self._bad(f"metadata key {key!r:.80} claims {length} strings")
            if length <= MAX_KEPT_ARRAY:
                return tuple(self._text(key) for _ in range(length))
            self._pass_texts(key, length)
            return LongArray(length)
        if element not in _TYPES:
            raise self._bad(f"metadata key {key!r:.80} is an array of unknown type {element}")
        self._need(length * struct.calcsize("<" + _TYPES[element]), key)
        if length <= MAX_KEPT_ARRAY:
            self._keep(length * PER_VALUE)
            return tuple(self._scalar(key, element) for _ in range(length))
        self._skip(length * struct.calcsize("<" + _TYPES[element]), key)
        return LongArray(length)

    def _scalar(self, key: str, type_id: int) -> Scalar:
        if type_id == _STRING:
            return self._text(key)
        if type_id not in _TYPES:
            raise self._bad(f"metadata key {key!r:.80} has unknown type {type_id}")
        code = "<" + _TYPES[type_id]
        value: Scalar = struct.unpack(code, self._take(struct.calcsize(code), key))[0]
        return value

    def _pass_texts(self, key: str, n_texts: int) -> None:
        """Goes past strings: of a large vocabulary there are some hundred thousand."""
        length_at = struct.Struct("<Q").unpack_from
        while n_texts:
            self._need(8, "a number")
            self._file.seek(self._pos)
            data = self._file.read(_CHUNK)
            if len(data) < 8:
                raise self._bad("the file became shorter while it was read")
            starts = starts_of(data, n_texts)
            n_texts -= len(starts)
            last = int(starts[-1])
            self._pos += last + 8
            self._skip(length_at(data, last)[0], key)  # only the last can go past the end of the file

    def _tensor(self) -> TensorEntry:
        n = self._int("Q")
        if not 0 < n < MAX_NAME:
            raise self._bad(f"a tensor name of {n} bytes (1 to {MAX_NAME - 1} are allowed)")
        name = self._take(n, "a tensor name").decode("utf-8", errors="replace")
        n_dims = self._int("I")
        if n_dims > 4:
            raise self._bad(f"tensor {name!r:.80} has {n_dims} dimensions (at most 4 are allowed)")
        shape = tuple(self._int("Q") for _ in range(n_dims))
        entry = TensorEntry(name, shape, self._int("I"), self._int("Q"))
        block = GGML_TYPES.get(entry.type_id, ("", 1, 1))[1]
        if entry.n_elements >= 2**63 or (shape and shape[0] % block):
            raise self._bad(
                f"tensor {name!r:.80} has the impossible shape {list(shape)} for {entry.type_name}"
            )
        return entry


def _check_layout(path: Path, header: GgufHeader) -> None:
    """Tensors must follow each other as gguf.cpp wants them, and lie inside the file."""
    if len({tensor.name for tensor in header.tensors}) < len(header.tensors):
        raise ModelCorrupt(path, "two tensors have the same name")
    alignment = header.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    assert isinstance(alignment, int)
    expected: int | None = 0  # None after a tensor of unknown size
    for tensor in header.tensors:
        if tensor.offset % alignment or (expected is not None and tensor.offset != expected):
            raise ModelCorrupt(path, f"tensor {tensor.name!r} lies at {tensor.offset}, not at {expected}")
        nbytes = tensor.nbytes
        end = header.data_start + tensor.offset + (nbytes or 0)
        if end > header.file_size:
            raise ModelCorrupt(
                path,
                f"it is cut short: tensor {tensor.name!r} ends at byte {end}, the file at {header.file_size}",
            )
        if nbytes is None or expected is None:
            expected = None
        else:
            expected = (tensor.offset + nbytes + alignment - 1) // alignment * alignment

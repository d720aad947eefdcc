"""A tar file that is written and read from front to back, with a checksum of every member in the last one."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from kvmem_llama.errors import ExportDamaged

from .files import Buffer, Files

CHECKSUMS: Final = "checksums.json"
_UNIT: Final = 512  # bytes; headers and data begin at multiples
_PIECE: Final = 1 << 20  # bytes read at once
_LIMIT: Final = 1 << 30  # bytes of a member that is read whole


class BundleWriter:
    """Members of known size, one after the other."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files: Final = files
        self._fd: Final = fd
        self._digests: Final[dict[str, str]] = {}
        self.nbytes = 0

    @contextmanager
    def member(self, name: str, size: int) -> Iterator[MemberWriter]:
        """Within: its bytes are written, `size` of them."""
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o600
        self._write([np.frombuffer(info.tobuf(tarfile.GNU_FORMAT), np.uint8)])
        member = MemberWriter(self)
        yield member
        assert member.nbytes == size, f"{name}: {member.nbytes} bytes instead of {size}"
        self._write([np.zeros(-size % _UNIT, np.uint8)])
        self._digests[name] = member.digest.hexdigest()

    def whole(self, name: str, data: bytes) -> None:
        """A small member."""
        with self.member(name, len(data)) as member:
            member.write(np.frombuffer(data, np.uint8))

    def finish(self) -> None:
        """Writes the checksums and the end of the tar."""
        self.whole(CHECKSUMS, json.dumps(self._digests).encode())
        self._write([np.zeros(2 * _UNIT, np.uint8)])

    def _write(self, buffers: list[Buffer]) -> None:
        self._files.write_from(self._fd, buffers, self.nbytes)
        self.nbytes += sum(buffer.nbytes for buffer in buffers)


class MemberWriter:
    """See BundleWriter.member."""

    def __init__(self, bundle: BundleWriter) -> None:
        self._bundle: Final = bundle
        self.digest: Final = xxhash.xxh3_128()
        self.nbytes = 0

    def write(self, data: Buffer) -> None:
        self.digest.update(data.data)
        self._bundle._write([data])
        self.nbytes += data.nbytes


class BundleReader:
    """Reads what BundleWriter has written; the file may be anything. Raises ExportDamaged for the rest."""

    def __init__(self, files: Files, fd: int, path: Path) -> None:
        self._files: Final = files
        self._fd: Final = fd
        self._path: Final = path
        self._length: Final = files.length(fd)
        self._at = 0
        self._digests: Final[dict[str, str]] = {}
        self._peeked: tarfile.TarInfo | None = None

    def damaged(self, why: str) -> ExportDamaged:
        return ExportDamaged(self._path, why)

    def begins_with(self, name: str) -> bool:
        """Whether the first member has this name: of a file of another kind it has not."""
        try:
            return self._header().name == name
        except ExportDamaged:
            return False

    def next_is(self, name: str) -> bool:
        """Whether the next member has this name."""
        return self._header().name == name

    def pieces(self, name: str, size: int | None = None) -> Iterator[Buffer]:
        """The next member, which must have this name, and this size if one is given; piece by piece."""
        info, self._peeked = self._header(), None
        if info.name != name or (size is not None and info.size != size):
            wanted = f"{name!r} of {size} bytes" if size is not None else repr(name)
            raise self.damaged(f"it has {info.name!r:.80} of {info.size} bytes where {wanted} belongs")
        digest = xxhash.xxh3_128()
        left = info.size
        while left:
            piece = self._take(min(left, _PIECE))
            digest.update(piece.data)
            left -= piece.nbytes
            yield piece
        self._take(-info.size % _UNIT)
        self._digests[name] = digest.hexdigest()

    def whole(self, name: str, size: int | None = None) -> bytes:
        """The next member."""
        if self._header().size > _LIMIT:
            raise self.damaged(f"{name} has {self._header().size} bytes")
        return b"".join(piece.tobytes() for piece in self.pieces(name, size))

    def into(self, name: str, buffer: Buffer) -> None:
        """The next member, which must have the size of `buffer`."""
        at = 0
        for piece in self.pieces(name, buffer.nbytes):
            buffer[at : at + piece.nbytes] = piece
            at += piece.nbytes

    def finish(self) -> None:
        """All members were read: their checksums must be the ones that were written."""
        found = dict(self._digests)
        try:
            written = json.loads(self.whole(CHECKSUMS))
        except ValueError as error:
            raise self.damaged("its checksums cannot be read") from error
        if written != found:
            names = [
                name for name in found if not isinstance(written, dict) or written.get(name) != found[name]
            ]
            raise self.damaged(f"the checksum of {', '.join(names[:3]) or 'a member'} differs")

    def _header(self) -> tarfile.TarInfo:
        if self._peeked is None:
            try:
                self._peeked = tarfile.TarInfo.frombuf(self._take(_UNIT).tobytes(), "utf-8", "strict")
            except (tarfile.HeaderError, UnicodeDecodeError) as error:
                raise self.damaged(f"no member begins at byte {self._at - _UNIT}") from error
            if self._peeked.size < 0 or not self._peeked.isreg():
                raise self.damaged(f"{self._peeked.name!r:.80} is no plain member")
        return self._peeked

    def _take(self, n: int) -> Buffer:
        if self._at + n > self._length:
            raise self.damaged(f"it ends after {self._length} bytes, {self._at + n} are needed")
        buffer = np.empty(n, np.uint8)
        self._files.read_into(self._fd, [buffer], self._at)
        self._at += n
        return buffer

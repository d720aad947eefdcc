"""Host over disk over tokens: the records of one durable workspace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvmem_llama.errors import InvalidOption, KvmemError, StoreFull

from .disk import DiskStore
from .disk_records import DiskRecords
from .entries import PENDING, Entries, Entry, Stage
from .fetch import Fetcher
from .location import Location
from .pool import HostFull, HostPool, State
from .raw_k import RawK
from .records import Record, RecordRef, StoreStats, Where
from .writer import Fall, Writer


@dataclass(frozen=True, slots=True)
class TierStats:
    """What lies where, and what it cost. A record in the pool is counted on disk too, once it is there."""

    n_host: int  # records in the pool
    n_pending: int  # of these, not safe on disk yet
    n_disk: int
    n_tokens: int  # records whose rows are gone
    disk_bytes: int  # of slots in use in own segments
    n_hits: int  # records taken from the pool
    n_reads: int  # records read from disk
    n_damaged: int  # reads that found a record lost
    n_evicted: int  # from the pool, by all its stores
    n_fallen: int  # to the tokens tier
    n_flush_waits: int  # commits that waited for stage-out
    flush_wait_seconds: float
    n_put_waits: int  # new records that waited for it, for room in the pool; by all its stores
    is_pinned: bool  # the pool is memory that a GPU reads without a copy


class TieredStore(DiskRecords):
    """A BlockStore whose records outlive the process, and the RecordFiles of its catalog.

    A record that is put goes to disk at once, on a thread of its own. `flush` waits for that; then `locate`
    says what the catalog must remember. What the host budget has no room for is read from disk; what the disk
    budget has no room for falls to the tokens tier: the coldest first, pinned ones never.

    A store that is only read keeps what is put in RAM until it is closed.
    """

    def __init__(
        self,
        pool: HostPool,
        disk: DiskStore,
        *,
        fall: Fall | None = None,
        raw_k: RawK | None = None,
        stage_out: bool = True,
        durable: bool = True,
        read_only: bool = False,
    ) -> None:
        """fall: makes it durable that the records at these locations are in the tokens tier; must not call
            `settle` for them. Called on the write worker without a lock.
        raw_k: how raw K lies on disk; None: as in RAM. `read` and `write` are about bytes on disk, all
            others about records in RAM.
        stage_out: write at once; otherwise when flushed, or when the host pool is full.
        durable: sync what is written; otherwise the operating system does in its own time.
        read_only: nothing is written.
        """
        self._raw_k: Final = raw_k or RawK.plain(disk.format.record_nbytes)
        assert self._raw_k.stored_nbytes == disk.format.record_nbytes
        nbytes = self._raw_k.record_nbytes
        if pool.budget < 2 * nbytes:
            raise InvalidOption(
                "--host-budget", pool.budget, f"must hold at least 2 records of {nbytes} bytes"
            )
        super().__init__(disk, durable=durable)
        self._pool: Final = pool
        self._entries: Final = Entries()
        self._read_only: Final = read_only
        self._writer: Final = Writer(
            self._entries, pool, disk, fall, self._raw_k, stage_out=stage_out, durable=durable
        )
        self._fetcher: Final = Fetcher(self._entries, pool, disk, self._raw_k)
        self._is_closed = False

    # -- what the memory uses: see BlockStore

    def put(self, record: Record) -> RecordRef:
        ref = self._pool.name()
        try:
            self._put(ref, record)
            with self._entries.changed:
                self._writer.check_open()
                self._entries.add(ref, Entry(ref.generation, Stage.QUEUED))
                self._write_or_keep(ref)
        except BaseException:
            self._pool.retire(ref)
            raise
        return ref

    def restore(self, ref: RecordRef, record: Record) -> None:
        self._restore(ref, record, Stage.TOKENS)

    def hold(self, ref: RecordRef) -> None:
        """A record of a store that is only read stays in RAM, whatever its writer does. Raises NotStored,
        RecordDamaged, StoreFailed or StoreFull."""
        self._restore(ref, self.get(ref).copy(), Stage.HELD)

    def get(self, ref: RecordRef) -> Record:
        return self._fetcher.get_many([ref])[0]

    def get_many(self, refs: Sequence[RecordRef]) -> list[Record]:
        return self._fetcher.get_many(refs)

    def fetch(self, refs: Sequence[RecordRef]) -> Iterator[list[tuple[int, Record]]]:
        return self._fetcher.fetch(refs)

    def prefetch(self, refs: Sequence[RecordRef]) -> int:
        return self._fetcher.prefetch(refs)

    def retrieved(self, refs: Sequence[RecordRef]) -> None:
        with self._entries.changed:
            slots = {ref.slot: None for ref in refs if self._entries.find(ref) is not None}
            self._pool.retrieved(list(slots))

    def where(self, ref: RecordRef) -> Where:
        with self._entries.changed:
            entry = self._entries.live(ref)
            if ref.slot in self._pool:
                return "host"
            return "tokens" if entry.location is None else "disk"

    def is_stuck(self, ref: RecordRef) -> bool:
        with self._entries.changed:
            return self._entries.live(ref).stage is Stage.FAILED

    def pin(self, refs: Sequence[RecordRef], pinned: bool = True) -> None:
        with self._entries.changed:
            for ref in refs:
                self._entries.live(ref).is_pinned = pinned

    def share(self, ref: RecordRef) -> None:
        with self._entries.changed:
            self._entries.live(ref).refs += 1

    def free(self, ref: RecordRef) -> None:
        with self._entries.changed:
            entry = self._entries.live(ref)
            entry.refs -= 1
            if entry.refs == 0:
                self._remove(ref, entry)

    def refcount(self, ref: RecordRef) -> int:
        with self._entries.changed:
            entry = self._entries.find(ref)
            return entry.refs if entry is not None else 0

    def stats(self) -> StoreStats:
        with self._entries.changed:
            n_host = sum(ref.slot in self._pool for ref, _ in self._entries)
            n_bytes = n_host * self._raw_k.record_nbytes
            return StoreStats(len(self._entries), n_bytes, self._pool.peak_bytes)

    def tiers(self) -> TierStats:
        """What lies where."""
        with self._entries.changed:
            stages = [entry.stage for _, entry in self._entries]
            n_host = sum(ref.slot in self._pool for ref, _ in self._entries)
        n_pending = sum(stage in PENDING or stage is Stage.FAILED for stage in stages)
        return TierStats(
            n_host=n_host,
            n_pending=n_pending,
            n_disk=stages.count(Stage.DURABLE),
            n_tokens=stages.count(Stage.TOKENS),
            disk_bytes=self._disk.n_bytes,
            n_hits=self._fetcher.n_hits,
            n_reads=self._fetcher.n_reads,
            n_damaged=self._fetcher.n_damaged,
            n_evicted=self._pool.n_evicted,
            n_fallen=self._writer.n_fallen,
            n_flush_waits=self._writer.n_waits,
            flush_wait_seconds=self._writer.wait_seconds,
            n_put_waits=self._pool.n_waits,
            is_pinned=self._pool.memory.is_pinned,
        )

    def give_up(self, ref: RecordRef) -> None:
        """The rows that `restore` was given are dropped if they could not be written. Raises StaleRecord."""
        with self._entries.changed:
            entry = self._entries.live(ref)
            if entry.stage is Stage.FAILED:
                self._writer.forget(ref)
                self._entries.set_stage([ref], Stage.TOKENS)
                self._pool.mark([ref.slot], State.EVICTABLE)
                self._pool.drop([ref.slot])

    def take(self, ref: RecordRef, location: Location) -> None:
        with self._entries.changed:
            self._entries.live(ref).location = location
            self._pool.drop([ref.slot])

    # -- what the catalog uses: see RecordFiles

    def flush(self) -> None:
        self._writer.flush()

    def locate(self, ref: RecordRef) -> Location | None:
        with self._entries.changed:
            entry = self._entries.live(ref)
            if entry.stage not in (Stage.DURABLE, Stage.TOKENS):
                raise RuntimeError(f"record {ref.slot} was not flushed")
            return entry.location

    def attach(self, location: Location | None, recent: float = 0.0, total: int = 0) -> RecordRef:
        """recent, total: the heat that was remembered; see `heat`."""
        ref = self._pool.name(recent, total)
        with self._entries.changed:
            stage = Stage.TOKENS if location is None else Stage.DURABLE
            self._entries.add(ref, Entry(ref.generation, stage, location))
        return ref

    def heat(self, ref: RecordRef) -> tuple[float, int]:
        """Recent (decayed) and cumulative retrievals. Raises StaleRecord."""
        with self._entries.changed:
            self._entries.live(ref)
            return self._pool.heat(ref.slot)

    def moved(self, places: Mapping[Location, Location]) -> None:
        """The catalog names records at other locations now; to be called before the old ones are settled."""
        with self._entries.changed:
            for _, entry in self._entries:
                if entry.location is not None:
                    entry.location = places.get(entry.location, entry.location)

    def close(self) -> None:
        """Joins the worker and forgets every reference. What was not flushed is lost."""
        if self._is_closed:
            return
        self._is_closed = True
        self._writer.close()
        self._fetcher.close()
        with self._entries.changed:
            for ref, _ in list(self._entries):
                self._entries.remove(ref)
                self._pool.retire(ref)
        self._disk.close()

    # -- private

    def _put(self, ref: RecordRef, record: Record) -> None:
        if record.nbytes != self._raw_k.record_nbytes:
            raise ValueError(f"a record of {record.nbytes} bytes instead of {self._raw_k.record_nbytes}")
        self._raw_k.round(record)
        try:
            self._pool.put(ref, record)
        except HostFull as full:
            with self._entries.changed:
                failure = self._writer.failure
            if isinstance(failure, KvmemError):
                # What could not be written takes the room: it is tried again, else nobody would ever do so.
                self._writer.flush()
                return self._put(ref, record)
            hint = "Set a larger --host-budget."
            if self._read_only:
                hint = f"What is added to a read-only workspace stays in RAM. {hint}"
            raise StoreFull("host pool", full.needed, 0, hint=hint) from None

    def _restore(self, ref: RecordRef, record: Record, stage: Stage) -> None:
        """stage: of the record in a store that is only read."""
        with self._entries.changed:
            if self._entries.live(ref).stage in (*PENDING, Stage.HELD):
                return  # it is not lost
        self._put(ref, record)
        with self._entries.changed:
            entry = self._entries.live(ref)
            if entry.stage in (*PENDING, Stage.HELD):
                return  # another thread was faster
            if entry.location is not None:
                self._disk.give_back(entry.location)  # unless the catalog names it: then it frees it
                entry.location = None
            self._write_or_keep(ref, stage)

    def _write_or_keep(self, ref: RecordRef, stage: Stage = Stage.HELD) -> None:
        """A record is in the pool. stage: in a store that is only read; if it is not HELD it may leave the
        pool. Under the lock."""
        if self._read_only:
            self._entries.set_stage([ref], stage)
            self._pool.mark([ref.slot], State.STUCK if stage is Stage.HELD else State.EVICTABLE)
        else:
            self._writer.queue(ref)

    def _remove(self, ref: RecordRef, entry: Entry) -> None:
        self._writer.forget(ref)
        self._entries.remove(ref)
        self._pool.retire(ref)
        if entry.location is not None:
            self._disk.give_back(entry.location)  # unless the catalog names it

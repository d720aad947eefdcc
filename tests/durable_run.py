"""A durable workspace without a model: tokens are numbers, and the record of a block is a function of the
tokens up to its end. So whatever a store hands out can be told right from wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvmem_llama.lexical import terms
from kvmem_llama.store.binding import Binding
from kvmem_llama.store.disk_records import DiskRecords
from kvmem_llama.store.durable import Durable
from kvmem_llama.store.files import Files
from kvmem_llama.store.holding import Holding
from kvmem_llama.store.loading import restore
from kvmem_llama.store.location import Origin
from kvmem_llama.store.names import Place
from kvmem_llama.store.pool import HostPool
from kvmem_llama.store.records import Record, RecordRef
from kvmem_llama.store.root import Root
from kvmem_llama.store.steps import NewBlock, ReadBlock, Restored, StepFacts
from kvmem_llama.store.stored_words import StoredWords
from kvmem_llama.store.tiered import TieredStore
from kvmem_llama.store.words import BlockWords, source_of

BLOCK = 4  # tokens
LAYERS = ((0, 2, 8), (2, 1, 16))  # of the index: layer number, KV heads, head size
N_K = 2048  # bytes
N_V = 1536
CHUNK = 8  # blocks per chunk of the index in RAM
SEGMENT = 4  # records


def make_binding(**changes: object) -> Binding:
    facts: dict[str, object] = {
        "model": "00112233445566778899aabbccddeeff",
        "model_name": "made up",
        "arch": "llama",
        "block_size": BLOCK,
        "raw_k_type": "f16",
        "cache_type_k": "f16",
        "cache_type_v": "f16",
        "rope": "the model's",
        "layout": "layout",
        "k_type": 1,
        "k_nbytes": N_K,
        "v_type": 1,
        "v_nbytes": N_V,
        "index_layers": LAYERS,
    }
    return Binding(**(facts | changes))  # type: ignore[arg-type]


def record_of(tokens: Sequence[int], count: int) -> Record:
    """The record of the block that ends with the last of `tokens`, `count` tokens long."""
    seed = xxhash.xxh3_64_intdigest(np.asarray([count, *tokens], np.int64).tobytes())
    return np.random.default_rng(seed).integers(0, 256, N_K + N_V, np.uint8)


def mean_of(record: Record, count: int) -> NDArray[np.float16]:
    """Stands for the Mean-K of a record: [elements of a row] float16."""
    n = sum(n_head * d for _, n_head, d in LAYERS)
    return (record[:n].astype(np.float32) + count).astype(np.float16)


def words_of(tokens: Sequence[int], number: int) -> BlockWords:
    """Stands for the words of a block of the history `tokens`."""
    text = " ".join(map(str, tokens[number * BLOCK : (number + 1) * BLOCK]))
    return BlockWords(source_of(np.asarray(tokens, np.int32), number, BLOCK), terms(text))


NO_MEANS = np.zeros(sum(n_head * d for _, n_head, d in LAYERS), np.float16)


class Memory:
    """What History and Session do, as far as the durable side sees it."""

    def __init__(
        self,
        root: Root,
        place: Place,
        *,
        read_only: bool = False,
        host_records: int = 8,
        budget: int = 0,
        binding: Binding | None = None,
        holding: Holding | None = None,
        pool: HostPool | None = None,
    ) -> None:
        self.root = root
        self.place = place
        self.holding = holding or Holding.open(root, place, binding or make_binding(), read_only=read_only)
        self.pool = pool or HostPool(host_records * (N_K + N_V))
        try:
            self.disk = self.holding.open_disk(segment_records=SEGMENT, budget=budget)
        except BaseException:
            self.holding.close()
            raise
        self.store = TieredStore(self.pool, self.disk, fall=self._fall, durable=root.durability == "full")
        try:
            self.journal = Durable(self.holding, self.store)
            self.restored: Restored = restore(
                self.holding, self.store, mean_of, scored=None, chunk_blocks=CHUNK
            )
        except BaseException:
            self.store.close()
            self.holding.close()
            raise
        self.tokens: list[int] = self.restored.tokens.tolist()
        self.blocks = list(self.restored.blocks)
        self.ahead = list(self.restored.ahead)

    # -- operations

    def step(self, ids: Sequence[int], *, kind: str = "step", answer: str = "", adopt: bool = True) -> None:
        """Appends tokens, and adopts blocks read ahead where they are the same."""
        tokens = self.tokens + list(ids)
        first = self.n_complete
        added: list[NewBlock] = []
        for start in range(first * BLOCK, len(tokens), BLOCK):
            count = min(BLOCK, len(tokens) - start)
            ref = None
            if adopt and count == BLOCK and self.ahead and self.ahead[0].start == start:
                read = self.ahead.pop(0)
                if read.ids.tolist() == tokens[start : start + BLOCK]:
                    ref = read.ref
                else:
                    self.store.free(read.ref)
                    self._drop_ahead()
            if ref is None:
                ref = self.store.put(record_of(tokens[: start + count], count))
            words = words_of(tokens, start // BLOCK) if count == BLOCK else None
            added.append(NewBlock(start // BLOCK, start, count, ref, text=f"text {start}", words=words))
        means = np.stack([mean_of(self.store.get(b.ref), b.count) for b in added])
        facts = StepFacts(kind, len(tokens), answer=answer, closed=bool(answer))
        with self._taking(first, added, tokens):
            self.journal.commit(np.asarray(ids, np.int32), added, means, facts, self._recalled())

    def rewrite(self, n: int, ids: Sequence[int]) -> None:
        """Takes `ids` in the place of all tokens from position `n` on."""
        tokens = self.tokens[:n] + list(ids)
        first = n // BLOCK
        added: list[NewBlock] = []
        for start in range(first * BLOCK, len(tokens), BLOCK):
            count = min(BLOCK, len(tokens) - start)
            ref = self.store.put(record_of(tokens[: start + count], count))
            words = words_of(tokens, start // BLOCK) if count == BLOCK else None
            origin = Origin.CARRIED if start > n else Origin.READ
            added.append(NewBlock(start // BLOCK, start, count, ref, origin, f"text {start}", words))
        means = np.stack([mean_of(self.store.get(b.ref), b.count) for b in added] or [NO_MEANS])[: len(added)]
        facts = StepFacts("read", len(tokens))
        with self._taking(first, added, tokens):
            self.journal.commit(np.asarray(ids, np.int32), added, means, facts, rewrites=n)

    @contextmanager
    def _taking(self, first: int, added: list[NewBlock], tokens: list[int]) -> Iterator[None]:
        """Within: they are committed in the place of the blocks from number `first` on."""
        try:
            yield
        except BaseException:
            for block in added:
                self.store.free(block.ref)
            raise
        self._drop_ahead()
        for gone in self.blocks[first:]:
            self.store.free(gone.ref)
        self.blocks[first:] = added
        self.tokens = tokens

    def read_ahead(self, ids: Sequence[int]) -> None:
        """Reads tokens after the head without committing them; whole blocks are kept."""
        self._drop_ahead()
        tokens = self.tokens + list(ids)
        for start in range(self.n_complete * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
            ref = self.store.put(record_of(tokens[: start + BLOCK], BLOCK))
            ids_here = np.asarray(tokens[start : start + BLOCK], np.int32)
            self.ahead.append(ReadBlock(start // BLOCK, start, ref, ids_here))
        self.journal.read_ahead(self.ahead)

    def truncate(self, n: int) -> None:
        start = n // BLOCK * BLOCK
        tail = None
        mean = None
        if start < n:
            record = record_of(self.tokens[:n], n - start)
            tail = NewBlock(start // BLOCK, start, n - start, self.store.put(record))
            mean = mean_of(record, n - start)
        try:
            self.journal.truncate(n, tail, mean)
        except BaseException:
            if tail is not None:
                self.store.free(tail.ref)
            raise
        self._drop_ahead()
        for gone in self.blocks[start // BLOCK :]:
            self.store.free(gone.ref)
        self.blocks[start // BLOCK :] = [] if tail is None else [tail]
        del self.tokens[n:]

    def fork(self, name: str) -> Memory:
        holding = self.journal.fork(name)
        return Memory(self.root, holding.place, holding=holding, pool=self.pool)

    def close(self) -> None:
        self.store.close()
        self.journal.close()

    # -- what must be true

    def check(self, tokens: Sequence[int] | None = None) -> None:
        """Every token, record and index row is the right one."""
        if tokens is not None:
            assert self.tokens == list(tokens)
        assert self.journal.n_tokens == len(self.tokens)
        assert [(b.number, b.start, b.start + b.count) for b in self.blocks] == [
            (i // BLOCK, i, min(i + BLOCK, len(self.tokens))) for i in range(0, len(self.tokens), BLOCK)
        ]
        for block in self.blocks:
            expected = record_of(self.tokens[: block.start + block.count], block.count)
            np.testing.assert_array_equal(self.store.get(block.ref), expected)
        assert not self.restored.unscored
        for number, words in StoredWords(self.holding).read().items():
            if self.holding.read_only and number >= self.n_complete:
                continue  # of what the writer has added since
            expected_words = words_of(self.tokens, number)
            assert number < self.n_complete and words.source == expected_words.source
            np.testing.assert_array_equal(words.terms, expected_words.terms)

    def check_index(self) -> None:
        """Index rows as they were loaded, of blocks that have not changed since."""
        for number, row in enumerate(index_rows(self.restored)):
            end = number * BLOCK + int(self.restored.counts[number])
            expected = mean_of(record_of(self.tokens[:end], end - number * BLOCK), end - number * BLOCK)
            np.testing.assert_array_equal(row, expected)

    @property
    def n_complete(self) -> int:
        return len(self.tokens) // BLOCK

    # -- private

    def _recalled(self) -> list[tuple[int, RecordRef]]:
        chosen = self.blocks[:2]
        self.store.retrieved([block.ref for block in chosen])
        return [(block.number, block.ref) for block in chosen]

    def _drop_ahead(self) -> None:
        for read in self.ahead:
            self.store.free(read.ref)
        self.ahead = []

    def _fall(self, locations: Sequence[object]) -> None:
        self.journal.fall(locations)  # type: ignore[arg-type]


def index_rows(restored: Restored) -> NDArray[np.float16]:
    """Rows of the index as they lie in its chunks: [n_blocks, elements]."""
    rows = np.zeros((len(restored.blocks), sum(n * d for _, n, d in LAYERS)), np.float16)
    for number in range(len(rows)):
        chunk, at = restored.chunks[number // CHUNK], number % CHUNK
        offset = 0
        for _, n_head, d in LAYERS:
            here = chunk[offset * CHUNK : (offset + n_head * d) * CHUNK].reshape(n_head, CHUNK, d)
            rows[number, offset : offset + n_head * d] = here[:, at].reshape(-1)
            offset += n_head * d
    return rows


def make_root(folder: Path, files: Files | None = None, durability: str = "full") -> Root:
    return Root(folder / "workspaces", files, durability=durability)


def make_memory(root: Root, name: str = "notes", n_tokens: int = 0, **options: int) -> Memory:
    """A new workspace of `n_tokens` tokens, read in one step."""
    memory = Memory(root, root.create(name, make_binding()), **options)  # type: ignore[arg-type]
    if n_tokens:
        memory.step(range(n_tokens), kind="read")
    return memory


def reopened(memory: Memory, **options: bool) -> Memory:
    """The same workspace, closed and opened again."""
    memory.close()
    return Memory(memory.root, memory.place, **options)


def open_records(holding: Holding) -> DiskRecords:
    return DiskRecords(holding.open_disk(segment_records=SEGMENT))

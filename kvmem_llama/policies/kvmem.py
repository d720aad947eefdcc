"""The paper's policy: all history stays, a bounded and query-dependent part of it is in the view."""

from __future__ import annotations

from typing import Self, TypeVar

from kvmem_llama.durable import Opened
from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.requests import TaskGenerator
from kvmem_llama.errors import InvalidOption, MandatoryTooLarge, StoreFull
from kvmem_llama.memory.history import History
from kvmem_llama.memory.index import mean_of
from kvmem_llama.memory.ledger import Ledger
from kvmem_llama.memory.query import StepRequest
from kvmem_llama.memory.report import StepResult
from kvmem_llama.memory.search import SearchResult, search
from kvmem_llama.memory.session import Session
from kvmem_llama.memory.step import Step, read
from kvmem_llama.native.layout import I32

from .policy import MemoryStats

T = TypeVar("T")


class KVMem:
    """See policies.policy.Policy."""

    name = "kvmem"

    def __init__(self, core: EngineCore, opened: Opened | None = None) -> None:
        """opened: the durable workspace that this is the memory of; closed with it."""
        self._opened = opened
        self._session = Session(core, None if opened is None else _stored_history(core, opened))

    @property
    def n_view(self) -> int:
        return self._session.budget.n_view

    @property
    def n_tokens(self) -> int:
        return self._session.history.n_committed

    def tokens(self, start: int = 0, end: int | None = None) -> I32:
        return self._session.history.tokens(start, end)

    def read(self, tokens: I32) -> TaskGenerator[StepResult]:
        return self._within_ram(read(self._session, tokens))

    def step(self, request: StepRequest) -> TaskGenerator[StepResult]:
        return self._within_ram(Step(self._session, request).run())

    def search(self, tokens: I32, n: int) -> TaskGenerator[SearchResult]:
        """See memory.search.search."""
        return self._within_ram(search(self._session, tokens, n))

    def truncate(self, n_tokens: int) -> None:
        self._session.view.drop_from(n_tokens)
        self._session.view.slack.forget(n_tokens)
        self._session.history.truncate(n_tokens)
        self._session.view.tidy()

    def fork(self) -> Self:
        other = object.__new__(type(self))
        other._opened = None
        other._session = self._session.fork()
        return other

    def pin(self, start: int, end: int) -> None:
        history, budget = self._session.history, self._session.budget
        pins = [*history.pins, (start, end)]
        canonical = budget.canonical(pins)
        budget.check_read(canonical)
        needed = canonical.n_least + budget.n_reserve
        if needed > budget.n_view:
            raise MandatoryTooLarge(
                needed, budget.n_view, hint="Pin fewer tokens, or use a larger view (-c)."
            )
        history.pin(pins)

    def unpin(self, start: int, end: int) -> None:
        history = self._session.history
        if (start, end) not in history.pins:
            raise InvalidOption(
                "unpin", f"{start}..{end}", "no such pin", hint=f"Pins are {history.pins or 'none'}."
            )
        pins = list(history.pins)
        pins.remove((start, end))
        history.pin(pins)

    def stats(self) -> MemoryStats:
        history, view = self._session.history, self._session.view
        store = history.store.stats()
        return MemoryStats(
            policy=self.name,
            n_tokens=history.n_committed,
            n_view=self._session.budget.n_view,
            n_resident=view.n_tokens,
            n_hidden=view.slack.n_tokens,
            n_cells_used=self._session.core.pool.n_used,
            n_blocks=len(history.table),
            n_orphans=len(history.orphans),
            n_records=store.n_records,
            store_bytes=store.n_bytes,
            index_bytes=history.index.nbytes + history.texts.nbytes,
            pins=tuple(history.pins),
            n_recomputed=self._session.n_recomputed,
            tiers=None if self._opened is None else self._opened.store.tiers(),
        )

    def evict(self) -> None:
        self._session.evict()

    def close(self) -> None:
        if self._opened is None:
            self._session.history.close()
        else:
            self._session.history.texts.close()
            self._opened.close()

    def _within_ram(self, task: TaskGenerator[T]) -> TaskGenerator[T]:
        """What a step had read of a text that is too long for RAM would be in the way of the next one; only
        a workspace that is written to disk can keep it."""
        try:
            return (yield from task)
        except StoreFull:
            if self._opened is not None and self._opened.read_only:
                self._session.history.orphans.clear()
            raise


def _stored_history(core: EngineCore, opened: Opened) -> History:
    """The history of a durable workspace; nothing of it is in cells, nor are its records in memory."""
    assert core.hooks is not None
    vocab = core.model.vocab

    def text_of(tokens: I32) -> str:
        return vocab.detokenize(tokens).decode("utf-8", "replace")

    ledger = None
    if opened.journal is not None:
        ledger = Ledger(
            opened.journal,
            mean_of(core.hooks.layers, core.hooks.layout),
            text_of,
            block=core.settings.block_size,
            read_blocks=core.settings.commit_blocks,
        )
    history = Session.new_history(core, opened.store, ledger, lambda: opened.store.attach(None))
    history.restore(opened.restored)
    return history

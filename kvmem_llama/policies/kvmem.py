"""The paper's policy: all history stays, a bounded and query-dependent part of it is in the view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.requests import TaskGenerator
from kvmem_llama.errors import InvalidOption, MandatoryTooLarge, StoreError, StoreFull
from kvmem_llama.matching import Plan, Span
from kvmem_llama.memory.attending import AttendedBlock, attended
from kvmem_llama.memory.explain import tier_of
from kvmem_llama.memory.history import History
from kvmem_llama.memory.index import mean_of
from kvmem_llama.memory.ledger import Ledger
from kvmem_llama.memory.query import StepRequest, query_of
from kvmem_llama.memory.report import StepResult, Tier
from kvmem_llama.memory.search import SearchResult, search
from kvmem_llama.memory.session import Session, token_source_of
from kvmem_llama.memory.step import Step, read
from kvmem_llama.native.layout import I32

from .policy import MemoryStats

if TYPE_CHECKING:
    from kvmem_llama.durable import Opened

T = TypeVar("T")


class KVMem:
    """See policies.policy.Policy."""

    name = "kvmem"

    def __init__(self, core: EngineCore, opened: Opened | None = None) -> None:
        """opened: the durable workspace that this is the memory of; closed with it."""
        self._opened = opened
        self._session = Session(core, None if opened is None else _stored_history(core, opened))
        self._draft: Session | None = None  # of a rewrite that did not reach its commit

    @property
    def n_view(self) -> int:
        return self._session.budget.n_view

    @property
    def n_tokens(self) -> int:
        return self._session.history.n_committed

    def tokens(self, start: int = 0, end: int | None = None) -> I32:
        return self._session.history.tokens(start, end)

    def read(self, tokens: I32) -> TaskGenerator[StepResult]:
        return self._alone(read(self._session, tokens))

    def step(self, request: StepRequest) -> TaskGenerator[StepResult]:
        return self._alone(Step(self._session, request).run())

    def rewrite(self, plan: Plan, request: StepRequest | I32) -> TaskGenerator[StepResult]:
        """Keeps the first `plan.prefix` tokens, and makes a step over them whose commit takes the place of
        all the others: they are gone then, at once, and not before. What the step would read and a span of
        the plan holds is taken over.

        request: a step, or tokens that are only read; it begins with the wanted token after the prefix.
        """
        old = self._session
        draft = self._drafted(plan)
        old.evict()
        try:
            task = Step(draft, request).run() if isinstance(request, StepRequest) else read(draft, request)
            result = yield from self._within_ram(task)
        except BaseException as error:
            old.history.take_rows(draft.history)
            draft.evict()
            draft.carried = None
            if isinstance(error, StoreError):  # what it has read would be in the way
                draft.history.close()
            else:
                self._draft = draft
            raise
        draft.carried = None
        draft.n_recomputed += old.n_recomputed
        self._session = draft
        old.history.close()
        return result

    def step_after(self, n_tokens: int, request: StepRequest) -> TaskGenerator[StepResult]:
        """Cuts the history to its first `n_tokens` and makes a step: cheaper than a rewrite, which would take
        them out of the cells and put them back.

        Nothing is cut where the step cannot fit; where it fails later or is cancelled, what was cut is gone.
        """
        session = self._session
        budget, n = session.budget, len(request.tokens)
        query = query_of(request, request.options(session.settings))
        pins = [(start, min(end, n_tokens)) for start, end in session.history.pins if start < n_tokens]
        canonical = budget.canonical(pins)
        budget.check_read(canonical)
        budget.check_step(canonical, n_tokens + query.start, n - query.start)
        session.check_positions(n_tokens + n + budget.n_reserve)
        self.truncate(n_tokens)
        return (yield from self.step(request))

    def search(self, tokens: I32, n: int) -> TaskGenerator[SearchResult]:
        """See memory.search.search."""
        return self._within_ram(search(self._session, tokens, n))

    def attended(self, answer_start: int) -> TaskGenerator[tuple[AttendedBlock, ...]]:
        """See memory.attending.attended."""
        return self._within_ram(attended(self._session, answer_start))

    def truncate(self, n_tokens: int) -> None:
        self._drop_draft()
        self._session.view.drop_from(n_tokens)
        self._session.view.slack.forget(n_tokens)
        self._session.history.truncate(n_tokens)
        n_left = n_tokens // self._session.budget.block
        self._session.selected = frozenset(n for n in self._session.selected if n < n_left)
        self._session.view.tidy()

    def fork(self) -> Self:
        other = object.__new__(type(self))
        other._opened = None
        other._session = self._session.fork()
        other._draft = None
        return other

    def take_over(self, other: KVMem, n_tokens: int) -> None:
        """The next step takes over the rows of `other`'s first `n_tokens` tokens, as far as it reads the same
        ones at the same place, instead of evaluating them. `other` must not change until then."""
        n = min(n_tokens, other._session.history.n_committed)
        self._session.carried = other._session.carry_into((Span(0, 0, n),) if n else ())

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
            index_bytes=history.indexes.nbytes + history.texts.nbytes,
            index_bytes_per_token=self._bytes_per_token(),
            n_without_rows=history.n_without_rows,
            score=self._session.retriever.name,
            hint=self._session.retriever.channels.hint,
            pins=tuple(history.pins),
            n_recomputed=self._session.n_recomputed,
            tiers=None if self._opened is None else self._opened.store.tiers(),
        )

    def tiers(self) -> tuple[tuple[int, Tier], ...]:
        """Where the rows of each block are now, by its first token, in history order."""
        return tuple(
            (int(block.start), tier_of(self._session, block.start)) for block in self._session.history.table
        )

    def evict(self) -> None:
        self._session.evict()

    def _bytes_per_token(self) -> dict[str, float]:
        """Of the indexes in RAM. That of words is made by the first search, and depends on the text."""
        history = self._session.history
        of = history.indexes
        sizes = {"mean_k": of.mean_k, "heads": of.tokens}
        found = {name: index.bytes_per_token for name, index in sizes.items() if index is not None}
        if history.texts.nbytes and history.n_committed:
            found["lexical"] = history.texts.nbytes / history.n_committed
        return found

    def close(self) -> None:
        self._drop_draft()
        if self._opened is None:
            self._session.history.close()
        else:
            self._session.history.texts.close()
            self._opened.close()

    def _drafted(self, plan: Plan) -> Session:
        """A new draft, or that of the rewrite before, which did not reach its commit: what it had read is not
        read twice."""
        history = self._session.history
        if self._draft is not None:
            draft, n = self._draft, self._draft.history.n_committed
            if n == plan.prefix and np.array_equal(draft.history.tokens(), history.tokens(0, n)):
                self._draft = None
                draft.history.take_rows(history)
                draft.carried = self._session.carry_into(plan.spans)
                draft.history.pins = [(start, min(end, n)) for start, end in history.pins if start < n]
                return draft
            self._drop_draft()
        return self._session.draft(plan.prefix, plan.spans)

    def _drop_draft(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.history.close()

    def _alone(self, task: TaskGenerator[T]) -> TaskGenerator[T]:
        """A step over the whole history: a rewrite that was begun is not wanted any more once it is done."""
        try:
            result = yield from self._within_ram(task)
        finally:
            self._session.carried = None
        self._drop_draft()
        return result

    def _within_ram(self, task: TaskGenerator[T]) -> TaskGenerator[T]:
        """What a step had read of a text that is too long for RAM would be in the way of the next one; only
        a workspace that is written to disk can keep it."""
        try:
            return (yield from task)
        except StoreFull:
            self._drop_draft()
            if self._opened is not None and self._opened.read_only:
                self._session.history.orphans.clear()
            raise


def _stored_history(core: EngineCore, opened: Opened) -> History:
    """The history of a durable workspace; nothing of it is in cells, nor are its records in memory."""
    assert core.hooks is not None
    vocab = core.model.vocab

    def text_of(tokens: I32) -> str:
        return vocab.detokenize(tokens).decode("utf-8", "replace")

    ledger, tokens = None, token_source_of(core)
    if opened.journal is not None:
        ledger = Ledger(
            opened.journal,
            mean_of(core.hooks.layers, core.hooks.layout),
            text_of,
            block=core.settings.block_size,
            read_blocks=core.settings.commit_blocks,
            token_row_of=None if tokens is None else tokens.row_of,
        )
    from kvmem_llama.store.stored_words import StoredWords

    words = StoredWords(opened.holding)
    history = Session.new_history(core, opened.store, ledger, lambda: opened.store.attach(None), words)
    history.restore(opened.restored)
    return history

"""What one workspace keeps under the kvmem policy, and how it goes to a target view. Owner thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Self

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.errors import InvalidOption, ModelUnsupported
from kvmem_llama.matching import Span
from kvmem_llama.native.layout import I32
from kvmem_llama.settings import Settings
from kvmem_llama.store.host import HostStore
from kvmem_llama.store.raw_k import RawK
from kvmem_llama.store.records import BlockStore, RecordRef
from kvmem_llama.store.token_file import TokenSource

from .budget import Budget
from .canonical import Canonical, Part
from .carrying import Carried, Rows
from .channels import Channels
from .heads import indexed_heads
from .history import History
from .indexes import Indexes
from .ledger import Ledger
from .link import TaskLink
from .planner import Target
from .query_rows import QueryBuffer, ScoredLayers
from .report import Finished, StepResult
from .retrieval import Retriever
from .scoring import make_head_scorer
from .texts import BlockTexts, WordsSource
from .token_index import token_source
from .view import View


class Session:
    """The history of a workspace, its view, and the engine both belong to."""

    after_step: ClassVar[Callable[[Session], None] | None] = None
    """Called at the end of every step. Tests set it to invariants.check."""

    def __init__(self, core: EngineCore, history: History | None = None) -> None:
        """history: that of a fork, or one that was stored. Raises ModelUnsupported for a model without hooks,
        InvalidOption."""
        if core.hooks is None:
            raise ModelUnsupported(
                core.model.arch,
                "its keys cannot be captured",
                hint="Use --policy full_context or --policy sliding_window.",
            )
        settings = core.settings
        self.core: Final = core
        self.hooks: Final = core.hooks
        self.settings: Final = settings
        self.options = settings  # of the step that runs: a step may choose some of them anew
        self.link: Final = TaskLink(core)
        self.budget: Final = Budget.of(settings, core.n_view, core.model.n_ctx_train)
        channels = Channels.of(settings, core.calibration)
        self.layers: Final = ScoredLayers.of(channels, settings, self.hooks.layers)
        head_scorer = make_head_scorer(settings) if "heads" in channels else None
        self.retriever: Final = Retriever(
            channels,
            core.scorer,
            head_scorer,
            self.hooks.layers,
            settings.stickiness,
            settings.scan_limit,
        )
        self.selected: frozenset[int] = frozenset()  # numbers of blocks, by the last recall
        if history is None:
            history = self.new_history(core, HostStore(RawK.of(self.hooks.layout)))
        self.history: Final = history
        self.n_recomputed = 0  # blocks whose rows were lost
        self.carried: Carried | None = None  # of a draft: what is not read again
        self.user_rows: tuple[object, object, QueryBuffer] | None = None
        """Raw Q of the newest text of a user before this step, and what it is of. See earlier."""
        self.view: Final = View(core.pool, self.hooks, history, settings, self.budget.n_slack)

    @staticmethod
    def new_history(
        core: EngineCore,
        store: BlockStore,
        ledger: Ledger | None = None,
        no_rows: Callable[[], RecordRef] | None = None,
        words: WordsSource | None = None,
    ) -> History:
        """An empty history. ledger, words: of a durable one. no_rows: see History. The engine must have
        hooks."""
        assert core.hooks is not None
        hooks, settings = core.hooks, core.settings
        channels = Channels.of(settings, core.calibration)
        indexes = Indexes.of(channels, settings, hooks.layers, hooks.layout)
        n_sink = Budget.of(settings, core.n_view, core.model.n_ctx_train).n_sink
        texts = BlockTexts(lambda tokens: _text_of(core, tokens), settings.block_size, words)
        return History(
            store, indexes, texts, settings.block_size, hooks.layout.nbytes, ledger,
            n_sink=n_sink, no_rows=no_rows,
        )  # fmt: skip

    def text_of(self, tokens: I32) -> str:
        """The text of token ids; template tokens have none, characters cut at the edges are replaced."""
        return _text_of(self.core, tokens)

    def fork(self) -> Self:
        """A session of its own over the committed history; it has no cells yet."""
        return type(self)(self.core, self.history.fork())

    def draft(self, n_tokens: int, spans: Sequence[Span]) -> Self:
        """A session over the first `n_tokens` tokens, whose next step takes the place of all that comes after
        them here. See History.draft. spans: what that step takes over from this history. It runs on the same
        sequence, so this one must be without cells."""
        other = type(self)(self.core, self.history.draft(n_tokens))
        other.carried = self.carry_into(spans)
        return other

    def carry_into(self, spans: Sequence[Span]) -> Carried:
        """What a draft may take over from this history."""
        return Carried(self.history, spans, Rows(self.hooks.layout))

    @property
    def canonical(self) -> Canonical:
        """The canonical view as the pins are now."""
        return self.budget.canonical(self.history.pins)

    # -- the life of a task

    def begin(self, options: Settings | None = None) -> None:
        """A task starts: it may have been given another sequence id, but only with an empty view.

        options: see RecallParams.over; None: the settings.
        """
        self.options = options or self.settings
        assert self.view.seq == self.core.seq or not self.view.n_tokens
        self.view.seq = self.core.seq

    def finish(self, result: StepResult) -> None:
        """A step is committed."""
        check = type(self).after_step
        if check is not None:
            check(self)
        self.link.emit(Finished(result))

    def evict(self) -> None:
        """Gives up every cell; the next step rebuilds its view from records (engine.sequences.Resident)."""
        self.view.clear()
        self.view.seq = -1

    def drop_from(self, n_tokens: int) -> None:
        """Takes tokens that were evaluated in this step out of the history and the view again."""
        if n_tokens < self.history.n_tokens:
            self.view.drop_from(n_tokens)
            self.view.slack.forget(n_tokens)
            self.history.cut(n_tokens)

    # -- positions

    def is_original(self, end: int) -> bool:
        """Blocks keep their token positions in a view that is to reach token position `end`.

        Where original positions were asked for they are never packed: `check_positions` and `is_at_end`
        keep tokens within the trained window, whatever a view could have reached.
        """
        mode = self.settings.position_mode
        return mode == "original" or (mode == "auto" and end <= self.budget.n_train)

    def is_at_end(self, n_tokens: int) -> bool:
        """A history of `n_tokens` fills the trained window, and original positions were asked for."""
        return self.settings.position_mode == "original" and n_tokens >= self.budget.n_train

    def check_positions(self, end: int) -> None:
        """Raises InvalidOption if original positions were asked for and the history outgrows the window."""
        if self.settings.position_mode == "original" and end > self.budget.n_train:
            raise InvalidOption(
                "--position-mode",
                "original",
                f"the history would reach {end} tokens, the model was trained with {self.budget.n_train}",
                hint="Use --position-mode auto, which packs positions once they outgrow the window.",
            )

    # -- views

    def room(self, at: int, n_view: int) -> int:
        """Tokens that can be evaluated from position `at` on before a view of `n_view` tokens is full, or its
        positions reach the end of the trained window."""
        return min(n_view - self.view.n_tokens, self.budget.n_train - self.view.position_of(at))

    def target(self, parts: Sequence[Part], end: int) -> Target:
        """`parts` at the positions they get in a view that is to reach token position `end`."""
        return Target.of(parts, original=self.is_original(end))

    def go_to(self, target: Target, *, rebuild: bool) -> None:
        """Makes the view `target`, by the cheapest plan. Raises NotStored or RecordDamaged if rows of it are
        lost; then nothing is left of the view. See recompute.reach."""
        self.view.apply(target, self.view.plan(target, rebuild=rebuild))

    def shrunk_view(self, n_more: int) -> tuple[Part, ...]:
        """The parts of the view as it is, without the oldest blocks that stand in the way of `n_more` tokens;
        sink, pins and the block that is still open stay."""
        canonical = self.canonical
        surplus = self.view.n_tokens + n_more - self.budget.n_view
        kept = []
        for part in (r.part for r in self.view):
            is_fixed = part.start < canonical.n_sink or part.start in canonical.pins
            if surplus > 0 and not is_fixed and part.count == self.budget.block:
                surplus -= part.count
            else:
                kept.append(part)
        return tuple(kept)


def token_source_of(core: EngineCore) -> TokenSource | None:
    """What makes rows of the token index that the engine's score reads; None if it reads none."""
    assert core.hooks is not None
    channels, hooks = Channels.of(core.settings, core.calibration), core.hooks
    calibration = channels.calibration
    if calibration is None:
        return None
    heads = indexed_heads(calibration, hooks.layers)
    return token_source(hooks.layers, hooks.layout, heads, calibration.index_type)


def _text_of(core: EngineCore, tokens: I32) -> str:
    return core.model.vocab.detokenize(tokens, special=False).decode("utf-8", "replace")

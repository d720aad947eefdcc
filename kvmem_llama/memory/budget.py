"""How many tokens of the view each of its parts may take, and the refusal of a step that cannot fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvmem_llama.errors import InvalidOption, MandatoryTooLarge
from kvmem_llama.settings import Settings

from .canonical import Canonical, ceil_to, floor_to, pin_blocks


@dataclass(frozen=True, slots=True)
class Budget:
    """Sizes in tokens, none above `n_view` but n_train; multiples of `block` but n_train, n_query,
    n_query_tail and n_slack."""

    block: int
    n_view: int  # the execution view
    n_read: int  # the view while reading
    n_train: int  # the window the model was trained with
    n_sink: int
    n_recent: int
    n_reserve: int  # at least one block
    n_query: int
    n_query_tail: int
    n_slack: int  # most tokens of hidden blocks

    @classmethod
    def of(cls, settings: Settings, n_view: int, n_train: int) -> Budget:
        """Resolves the defaults that depend on the view: recent is a quarter of it, the reserve an eighth.

        n_view: the engine's budget of one sequence, tokens; cut to whole blocks. Larger sizes mean the same
            as all of the view: a sink or a reserve of that size is refused by the checks below.
        Raises InvalidOption if it holds no block, or the view for reading none beside the sink.
        """
        block = settings.block_size
        if n_view < block:
            raise InvalidOption("-c", n_view, f"the view must hold at least one block of {block} tokens")
        n_view = floor_to(block, n_view)
        n_recent = n_view // 4 if settings.n_recent < 0 else settings.n_recent
        n_reserve = n_view // 8 if settings.n_reserve < 0 else ceil_to(block, settings.n_reserve)
        n_sink = min(ceil_to(block, settings.n_sink), n_view)
        n_read = min(floor_to(block, settings.n_prefill_view), n_view) if settings.n_prefill_view else n_view
        if settings.n_prefill_view and n_read < min(n_sink + block, n_view):
            raise InvalidOption(
                "--n-prefill-view",
                settings.n_prefill_view,
                f"reading needs at least {n_sink + block} tokens: the sink and one block of {block}",
                hint="Use a larger one, or 0 to read over all of the view.",
            )
        return cls(
            block=block,
            n_view=n_view,
            n_read=n_read,
            n_train=n_train,
            n_sink=n_sink,
            n_recent=min(floor_to(block, n_recent), n_view),
            n_reserve=min(max(floor_to(block, n_reserve), block), n_view),
            n_query=min(settings.n_query, n_view),
            n_query_tail=min(settings.n_query_tail, n_view),
            n_slack=int(settings.slack * n_view),
        )

    def canonical(self, pins: Iterable[tuple[int, int]]) -> Canonical:
        """The canonical view for `pins`, ranges of token positions [start, end)."""
        return Canonical(
            n_view=self.n_view,
            n_read=self.n_read,
            block=self.block,
            n_sink=self.n_sink,
            pins=pin_blocks(self.block, self.n_sink, pins),
        )

    def check_read(self, canonical: Canonical) -> None:
        """Raises MandatoryTooLarge if sink, pins and one block to read do not fit the reading view."""
        if canonical.n_least > self.n_read:
            hint = "Use a larger --n-prefill-view, or fewer pins." if self.n_read < self.n_view else ""
            raise MandatoryTooLarge(canonical.n_least, self.n_read, hint=hint)

    def check_step(self, canonical: Canonical, query_start: int, n_query: int) -> None:
        """Raises MandatoryTooLarge if the hard set of a query, `n_query` tokens at `query_start`, cannot fit.

        The hard set: sink, pins, the query, the tokens of the block it starts in, and the reserve. Tokens
        of the query that lie in the sink count once.
        """
        n_open = query_start - floor_to(self.block, query_start) if query_start > self.n_sink else 0
        n_outside_sink = max(query_start + n_query - max(query_start, self.n_sink), 0)
        n_needed = canonical.n_fixed + n_open + n_outside_sink + self.n_reserve
        if n_needed > self.n_view:
            raise MandatoryTooLarge(n_needed, self.n_view)

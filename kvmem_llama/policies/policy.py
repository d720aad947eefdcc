"""What a workspace asks of the policy that decides what its model attends to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from kvmem_llama.engine.requests import TaskGenerator
from kvmem_llama.matching import Plan
from kvmem_llama.memory.query import StepRequest
from kvmem_llama.memory.report import StepResult
from kvmem_llama.native.layout import I32

if TYPE_CHECKING:
    from kvmem_llama.store.tiered import TierStats


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Counts of tokens, blocks and records; sizes in bytes."""

    policy: str
    n_tokens: int  # of the history
    n_view: int  # the execution view holds at most these
    n_resident: int  # tokens in the view now
    n_hidden: int  # tokens of blocks that left the view, but not their cells
    n_cells_used: int  # of all workspaces of the engine
    n_blocks: int = 0
    n_orphans: int = 0  # blocks that a cancelled step had read
    n_records: int = 0  # of this workspace and its forks
    store_bytes: int = 0  # of these records
    index_bytes: int = 0
    index_bytes_per_token: Mapping[str, float] = field(default_factory=dict)  # by index that the score uses
    n_without_rows: int = 0  # blocks that calibrated heads cannot find until they are computed again
    score: str = ""  # the channels that find blocks, and their calibration
    hint: str = ""  # what would find more
    pins: tuple[tuple[int, int], ...] = ()
    n_recomputed: int = 0  # blocks whose rows were lost, since the workspace was opened
    tiers: TierStats | None = None  # of a durable workspace


class Policy(Protocol):
    """One workspace's memory. Owner thread only. It is a Resident: between tasks it may keep its cells.

    Generators run as tasks of the engine. Whatever they raise, the history is as the last step left it.
    """

    @property
    def name(self) -> str: ...

    @property
    def n_view(self) -> int:
        """Most tokens the model attends to at once."""
        ...

    @property
    def n_tokens(self) -> int:
        """Tokens of the finished steps."""
        ...

    def tokens(self, start: int = 0, end: int | None = None) -> I32: ...

    def read(self, tokens: I32) -> TaskGenerator[StepResult]:
        """Appends tokens to the history."""
        ...

    def step(self, request: StepRequest) -> TaskGenerator[StepResult]:
        """Appends the tokens of a step and the answer to it."""
        ...

    def rewrite(self, plan: Plan, request: StepRequest | I32) -> TaskGenerator[StepResult]:
        """Drops all but the first `plan.prefix` tokens and appends those of `request`, a step or tokens that
        are only read. A policy may take over what it knows of the plan's spans."""
        ...

    def truncate(self, n_tokens: int) -> None:
        """Drops all but the first `n_tokens`."""
        ...

    def fork(self) -> Self:
        """A memory of its own with the same history."""
        ...

    def pin(self, start: int, end: int) -> None:
        """Keeps the blocks of the tokens start .. end-1 in every view. Raises MandatoryTooLarge."""
        ...

    def unpin(self, start: int, end: int) -> None:
        """Takes back one `pin` of these tokens. Raises InvalidOption if there is none."""
        ...

    def stats(self) -> MemoryStats: ...

    def evict(self) -> None:
        """Gives up every cell; the next task goes on without them."""
        ...

    def close(self) -> None:
        """Frees what is not in cells; `evict` comes before."""
        ...

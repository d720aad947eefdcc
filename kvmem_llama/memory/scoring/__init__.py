"""Block scores: what every scorer takes and gives. `reference` is the oracle, `cpu` the one that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ...settings import Settings
    from ..index import MeanKIndex
    from .tokens import HeadScorer


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Raw Q (before RoPE) of the query tokens of one recall, per scored layer."""

    layers: tuple[NDArray[np.float32], ...]  # each [n_query, n_head, d]
    scales: tuple[float, ...]  # what multiplies q.k before the softmax
    numbers: tuple[int, ...] = ()  # of the layers in the model; empty: nobody chooses among them

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.scales):
            raise ValueError(f"{len(self.layers)} layers of Q and {len(self.scales)} scales")
        if self.numbers and len(self.numbers) != len(self.layers):
            raise ValueError(f"{len(self.layers)} layers of Q and {len(self.numbers)} layer numbers")
        if len({len(q) for q in self.layers}) > 1:
            raise ValueError(f"query tokens differ between layers: {sorted({len(q) for q in self.layers})}")

    @property
    def n_query(self) -> int:
        """Query tokens."""
        return len(self.layers[0]) if self.layers else 0

    def only(self, numbers: Sequence[int]) -> QueryRows:
        """The rows of these layers of the model, in this order. Raises ValueError if one is not there."""
        if not self.numbers or tuple(numbers) == self.numbers:
            return self
        at = [self.numbers.index(number) for number in numbers]
        return QueryRows(tuple(self.layers[i] for i in at), tuple(self.scales[i] for i in at), tuple(numbers))


class BlockScorer(Protocol):
    """Scores the blocks of an index for one query. The index is only read."""

    name: str

    def score(
        self, query: QueryRows, index: MeanKIndex, candidates: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """One score per candidate, larger is better: [n_candidates].

        Args:
            query: rows of the layers that the index holds, in its order.
            candidates: block numbers of the index, strictly ascending.

        Raises:
            ValueError: query and index differ in shape, or a candidate is not in the index.
        """
        ...


def check_query(query: QueryRows, index: MeanKIndex, candidates: NDArray[np.int64]) -> None:
    """Raises ValueError unless query, index and candidates belong together."""
    if len(query.layers) != len(index.layers):
        raise ValueError(f"Q of {len(query.layers)} layers for an index of {len(index.layers)}")
    for i, (q, layer) in enumerate(zip(query.layers, index.layers, strict=True)):
        if q.ndim != 3 or q.shape[2] != layer.d or q.shape[1] < 1 or q.shape[1] % layer.n_head_kv:
            raise ValueError(
                f"scored layer {i}: Q of shape {q.shape}, KV heads {layer.n_head_kv} x {layer.d}"
            )
    check_candidates(candidates, len(index))


def check_candidates(candidates: NDArray[np.int64], n_blocks: int) -> None:
    """Raises ValueError unless they are ascending numbers of blocks."""
    if candidates.ndim != 1 or candidates.dtype != np.int64:
        raise ValueError(f"candidates of shape {candidates.shape} and type {candidates.dtype}")
    if len(candidates) and (
        candidates[0] < 0 or candidates[-1] >= n_blocks or (np.diff(candidates) <= 0).any()
    ):
        raise ValueError(f"candidates are not ascending block numbers below {n_blocks}")


def make_scorer(settings: Settings) -> BlockScorer:
    """The scorer that the settings ask for, with the engine's number of threads.

    Raises KernelsMissing if the native one cannot be loaded.
    """
    if settings.scorer == "reference":
        from .reference import ReferenceScorer

        return ReferenceScorer()
    from ...native import kernels
    from .cpu import CpuScorer

    return CpuScorer(kernels.load(), n_threads=_n_threads(settings))


def make_head_scorer(settings: Settings) -> HeadScorer:
    """As `make_scorer`, for the calibrated heads."""
    from ...native import kernels
    from .tokens import ReferenceTokenScorer, TokenScorer

    if settings.scorer == "reference":
        return ReferenceTokenScorer()
    return TokenScorer(kernels.load(), n_threads=_n_threads(settings))


def _n_threads(settings: Settings) -> int:
    from ...engine.machine import physical_cores

    return settings.n_threads_batch or settings.n_threads or physical_cores()

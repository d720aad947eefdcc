"""The calibrated heads of a model: which KV heads an index of them holds, and their part of a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.calibration import CalibratedHead, Calibration
from kvmem_llama.errors import InvalidOption
from kvmem_llama.native.layout import LayerInfo

from .scoring import QueryRows
from .scoring.tokens import HeadRows


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """The calibrated query heads that read one KV head."""

    il: int  # layer number in the model
    head_kv: int
    heads: tuple[int, ...]  # query heads of the layer
    mean_q: NDArray[np.float32] | None  # [n heads, d]: what is subtracted from their Q

    def rows(self, query: QueryRows) -> HeadRows:
        """query: rows of this layer among others."""
        i = query.numbers.index(self.il)
        q = query.layers[i][:, list(self.heads)]
        return HeadRows(q if self.mean_q is None else q - self.mean_q, query.scales[i])


def head_groups(calibration: Calibration, layers: Sequence[LayerInfo]) -> tuple[HeadGroup, ...]:
    """The heads of a calibration in the order of the index: by layer and KV head.

    layers: as the hooks report them. Raises InvalidOption if the model has no such head.
    """
    full = {layer.il: layer for layer in layers if layer.cache == 0}
    groups: dict[tuple[int, int], list[CalibratedHead]] = {}
    for head in calibration.heads:
        layer = full.get(head.layer)
        if layer is None or not 0 <= head.head < layer.n_head:
            raise _unfit(head, "the model has no such head with full attention")
        if head.mean_q is not None and len(head.mean_q) != layer.d_k:
            raise _unfit(head, f"its mean_q has {len(head.mean_q)} numbers, the head has {layer.d_k} dims")
        groups.setdefault((head.layer, head.head // (layer.n_head // layer.n_head_kv)), []).append(head)
    return tuple(_group(il, head_kv, heads) for (il, head_kv), heads in sorted(groups.items()))


def indexed_heads(calibration: Calibration, layers: Sequence[LayerInfo]) -> list[tuple[int, int]]:
    """(layer number in the model, KV head) of the keys that these heads read; raises as `head_groups`."""
    return [(group.il, group.head_kv) for group in head_groups(calibration, layers)]


def _group(il: int, head_kv: int, heads: list[CalibratedHead]) -> HeadGroup:
    heads.sort(key=lambda head: head.head)
    means = [head.mean_q for head in heads if head.mean_q is not None]
    mean_q = np.array(means, np.float32) if len(means) == len(heads) else None
    return HeadGroup(il, head_kv, tuple(head.head for head in heads), mean_q)


def _unfit(head: CalibratedHead, why: str) -> InvalidOption:
    return InvalidOption(
        "--calibration", f"layer {head.layer}, head {head.head}", why,
        hint="Run `kvmem calibrate MODEL --force` to make it again, or use --calibration none.",
    )  # fmt: skip

"""Records with random raw K, and the layers and indexes that go with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.memory.index import MeanKIndex
from kvmem_llama.memory.scoring import QueryRows
from kvmem_llama.native.layout import LayerInfo, RecordLayout

Shape = tuple[int, int, int]  # n_head, n_head_kv, d


def layer_info(il: int, shape: Shape, raw_k_type: str = "f16", cache: int = 0) -> LayerInfo:
    n_head, n_head_kv, d = shape
    return LayerInfo(
        il=il,
        cache=cache,
        rope=True,
        n_head=n_head,
        n_head_kv=n_head_kv,
        d_k=d,
        d_v=d,
        raw_k_row=n_head_kv * d * (2 if raw_k_type == "f16" else 4),
        k_row=n_head_kv * d * 2,
        v_row=n_head_kv * d * 2,
        scale=d**-0.5,
        type_k=1,
        type_v=1,
        k_rotated=False,
        rope_params=(0,) * 16,
        rope_factors=False,
        k_base=0,
        v_base=0,
    )


class Model:
    """Layers of a made-up model and random records of its blocks."""

    def __init__(
        self, shapes: Sequence[Shape], seed: int = 0, raw_k_type: str = "f16", block_size: int = 32
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.layers = tuple(layer_info(il, shape, raw_k_type) for il, shape in enumerate(shapes))
        self.layout = RecordLayout.of(self.layers, block_size, raw_k_type)

    def record(self, spread: float = 1.0) -> NDArray[np.uint8]:
        """A record whose raw K is normal with the given deviation around a mean of its own."""
        record = self.rng.integers(0, 256, self.layout.nbytes, np.uint8)
        for i, info in enumerate(self.layers):
            rows = self.layout.raw_k(record, i, info, self.layout.block_size)
            centre = self.rng.normal(size=rows.shape[1:])
            rows[:] = centre + spread * self.rng.normal(size=rows.shape)
        return record

    def index(self, n_blocks: int, chunk_blocks: int = 64) -> MeanKIndex:
        """An index of `n_blocks` blocks, the last one partial."""
        index = MeanKIndex(self.layers, self.layout, chunk_blocks=chunk_blocks)
        records = [self.record() for _ in range(min(n_blocks, 40))]  # enough to differ, cheap to make
        for b in range(n_blocks):
            record = records[b % len(records)]
            count = self.layout.block_size
            if b >= len(records):  # other means from the same record: fewer of its rows
                count = 1 + b % (self.layout.block_size - 1)
            index.append(record, count if b < n_blocks - 1 else max(count // 2, 1))
        return index

    def query(self, n_query: int, strength: float = 1.0) -> QueryRows:
        """Random Q. `strength` sets how peaked the softmax is."""
        rows = tuple(
            (strength * self.rng.normal(size=(n_query, layer.n_head, layer.d_k))).astype(np.float32)
            for layer in self.layers
        )
        return QueryRows(rows, tuple(layer.scale for layer in self.layers))

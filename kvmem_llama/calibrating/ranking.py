"""Ranks the query heads of a model by how well each of them alone agrees with the search by words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..memory.retrieval import spread
from ..native.layout import F32, LayerInfo
from .reading import F16, F64, I64, Done, Read

Head: TypeAlias = tuple[int, int]
"""Layer number in the model, query head."""

N_HEADS: Final = 8
"""Most heads that are kept: with 16 less was found than with 8, with 4 not more."""
_LEAST: Final = 0.4  # of the best head's agreement; below it a head adds noise
COST: Final = 50
"""Of one question for all heads: tokens that are read in the same time, roughly."""

_ROW_BYTES: Final = 18  # of 32 elements in q4_0


@dataclass(frozen=True, slots=True)
class Ranked:
    """What was found out about all heads on one history."""

    agreement: dict[Head, float]  # from 0 to 1
    sum_q: dict[Head, F64]  # [d] of the raw Q of all questions
    n_q: int  # tokens of these


def block_shares(keys: F32, q: F32, scale: float, block: int) -> NDArray[np.float32]:
    """Eq. 10 with every token in place of a block's mean, by head: softmax over all tokens, summed over the
    tokens of each block, mean over the query's. keys: [n_blocks * block, d]; q: [n_query, n_heads, d] of
    the heads that read them. -> [n_heads, n_blocks]"""
    n, n_heads, d = q.shape
    logits = (q * np.float32(scale)).reshape(-1, d) @ keys.T
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    parts = logits.reshape(len(logits), -1, block).sum(axis=2)
    parts /= parts.sum(axis=1, keepdims=True)
    shares: NDArray[np.float32] = parts.reshape(n, n_heads, -1).mean(axis=0)
    return shares


def tokens_of(blocks: I64, block: int) -> I64:
    """Token positions of blocks, in their order."""
    return (blocks[:, np.newaxis] * block + np.arange(block)).reshape(-1)


def rank_on(read: Read, scores: Sequence[F64], block: int, done: Done) -> Ranked:
    """scores: of each question by words, [n_blocks] for all blocks. Questions without a word in common with
    any candidate do not count. done: gets `COST` for each question, a part after each layer."""
    ids = [(layer.il, head) for layer in read.layers for head in range(layer.n_head)]
    agreement = np.zeros(len(ids))
    targets = []
    for one in scores:
        found = spread(one)[read.candidates]
        targets.append(int(found.argmax()) if found.max(initial=0.0) > 0 else -1)
    tokens = tokens_of(read.candidates, block)
    sums: dict[Head, F64] = {}
    at, cost = 0, COST * len(read.asked)
    for i, layer in enumerate(read.layers):
        group = layer.n_head // layer.n_head_kv
        for head_kv in range(layer.n_head_kv):
            keys = read.keys[i][tokens, head_kv].astype(np.float32)
            here = slice(head_kv * group, (head_kv + 1) * group)
            for asked, target in zip(read.asked, targets, strict=True):
                if target >= 0:
                    shares = block_shares(keys, asked.rows.layers[i][:, here], layer.scale, block)
                    agreement[at : at + group] += reciprocal_ranks(shares, target)
            at += group
        for head in range(layer.n_head):
            sums[layer.il, head] = np.sum(
                [asked.rows.layers[i][:, head].sum(axis=0, dtype=np.float64) for asked in read.asked], axis=0
            )
        done(cost * (i + 1) // len(read.layers) - cost * i // len(read.layers))
    n_counted = sum(target >= 0 for target in targets)
    values = (agreement / max(n_counted, 1)).tolist()
    return Ranked(dict(zip(ids, values, strict=True)), sums, sum(asked.rows.n_query for asked in read.asked))


def reciprocal_ranks(shares: NDArray[np.float32], target: int) -> F64:
    """1 / (rank of the target, or of the better one of its neighbours), by head: [n_heads]."""
    best = shares[:, max(target - 1, 0) : target + 2].max(axis=1)
    out: F64 = 1.0 / (1 + (shares > best[:, np.newaxis]).sum(axis=1))
    return out


def mean_k_bytes(layers: Sequence[LayerInfo], block: int) -> float:
    """Bytes per token of the Mean-K index of all heads in f16."""
    return sum(layer.n_head_kv * layer.d_k * 2 for layer in layers) / block


def index_bytes(heads: Sequence[Head], layers: Sequence[LayerInfo]) -> int:
    """Bytes per token of the keys that these heads read, in q4_0."""
    by_number = {layer.il: layer for layer in layers}
    keys = {(il, head // _group(by_number[il])) for il, head in heads}
    return sum(by_number[il].d_k // 32 * _ROW_BYTES for il, _ in keys)


def best_heads(agreement: Mapping[Head, float], layers: Sequence[LayerInfo], block: int) -> list[Head]:
    """The heads to use, best first: the next best one as long as the index of the keys they read takes at
    most half of the bytes of Mean-K over all heads, or those of two KV heads, whichever is more."""
    usable = {layer.il: layer for layer in layers if layer.d_k % 32 == 0}
    order = sorted(agreement, key=lambda head: (-agreement[head], head))
    chosen: list[Head] = []
    if not usable:
        return chosen
    budget = max(
        mean_k_bytes(layers, block) / 2,
        2 * max(layer.d_k for layer in usable.values()) // 32 * _ROW_BYTES,
    )
    for head in order:
        if head[0] not in usable or agreement[head] < _LEAST * agreement[order[0]]:
            continue
        if len(chosen) < N_HEADS and index_bytes([*chosen, head], layers) <= budget:
            chosen.append(head)
    return chosen


def head_keys(keys: F16, head_kv: int, tokens: I64) -> F32:
    """Raw K of one KV head as a q4_0 index has it: [n_tokens, d]."""
    from gguf import GGMLQuantizationType, quants

    rows = np.ascontiguousarray(keys[tokens, head_kv], dtype=np.float32)
    kind = GGMLQuantizationType.Q4_0
    out: F32 = quants.dequantize(quants.quantize(rows, kind), kind).astype(np.float32)
    return out


def _group(layer: LayerInfo) -> int:
    """Query heads that share a KV head."""
    return layer.n_head // layer.n_head_kv

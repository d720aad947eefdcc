"""The restore loop: raw K rotated into cells exactly as a float32 model of each rounding says; V as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvmem_llama.native import kernels
from kvmem_llama.native.kernels import Isa, Pairing, RestoreBlock, RestoreLayer, RopeForm

KERNELS = kernels.load()
ISAS = [isa for isa in Isa if Isa.AUTO < isa <= KERNELS.best_isa]
N_POSITIONS = 300
Rows = NDArray[np.float32]


def fma(a: Rows, b: Rows, c: Rows) -> Rows:
    """float32 fused multiply-add. The product is exact in float64; the sum is rounded to odd there, so that
    rounding it to float32 is rounding once."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    low = total - product  # two-sum: what the addition lost
    error = (product - (total - low)) + (addend - low)
    bits = total.view(np.int64)
    towards_zero = np.where((error != 0) & ((error > 0) != (total > 0)), bits - 1, bits)
    odd = np.where(error != 0, towards_zero | 1, bits)
    return odd.view(np.float64).astype(np.float32)


def rotated(x0: Rows, x1: Rows, c: Rows, s: Rows, form: RopeForm) -> tuple[Rows, Rows]:
    y0: dict[str, Callable[[], Rows]] = {
        "A": lambda: fma(x0, c, -(x1 * s)),
        "B": lambda: fma(-x1, s, x0 * c),
    }
    y1: dict[str, Callable[[], Rows]] = {
        "A": lambda: fma(x0, s, x1 * c),
        "B": lambda: fma(x1, c, x0 * s),
    }
    if form is RopeForm.PLAIN:
        return x0 * c - x1 * s, x0 * s + x1 * c
    first, second = form.name[-2:]
    return y0[first](), y1[second]()


@dataclass(frozen=True)
class Layer:
    n_head_kv: int
    d: int
    n_dims: int
    rot0: int
    pairing: Pairing
    v_row: int

    def pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The dims of a head that turn together."""
        half = np.arange(self.n_dims // 2)
        if self.pairing is Pairing.ADJACENT:
            return self.rot0 + 2 * half, self.rot0 + 2 * half + 1
        return self.rot0 + half, self.rot0 + half + self.n_dims // 2


class Cache:
    """Cells of a few layers, records of a few blocks, and what the cells should hold afterwards."""

    def __init__(self, layers: list[Layer], raw_k_type: str, seed: int, block_size: int = 8) -> None:
        self.rng = np.random.default_rng(seed)
        self.layers, self.raw_k_type, self.n_slots = layers, raw_k_type, block_size
        self.n_cells = 64
        self.dtype = np.float16 if raw_k_type == "f16" else np.float32
        size = np.dtype(self.dtype).itemsize
        self.table = [self._table(layer) for layer in layers]
        self.k = [np.full((self.n_cells, at.n_head_kv * at.d), 7, np.float16) for at in layers]
        self.v = [np.full((self.n_cells, at.v_row), 9, np.uint8) for at in layers]
        offset, native = 0, []
        for layer, table, k, v in zip(layers, self.table, self.k, self.v, strict=True):
            k_stride = layer.n_head_kv * layer.d * size
            v_offset = offset + block_size * k_stride
            native.append(
                RestoreLayer(
                    k_offset=offset,
                    k_stride=k_stride,
                    v_offset=v_offset,
                    v_row=layer.v_row,
                    k_cells=k.ctypes.data,
                    v_cells=v.ctypes.data,
                    k_cell_stride=k.strides[0],
                    v_cell_stride=v.strides[0],
                    n_head_kv=layer.n_head_kv,
                    d=layer.d,
                    n_dims=layer.n_dims,
                    rot0=layer.rot0,
                    pairing=layer.pairing,
                    cos_sin=table,
                )
            )
            offset = v_offset + block_size * layer.v_row
        self.native, self.nbytes = native, offset

    def _table(self, layer: Layer) -> Rows | None:
        if not layer.n_dims:
            return None
        angles = np.outer(
            np.arange(N_POSITIONS), 10000.0 ** -np.linspace(0, 1, layer.n_dims // 2, endpoint=False)
        )
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)

    def block(self, cells: NDArray[np.int32], slot0: int, pos0: int) -> RestoreBlock:
        """A block of random rows. In most pairs one of the two results nearly cancels: what is left is the
        rounding itself, which float16 would otherwise hide."""
        record = self.rng.integers(0, 256, self.nbytes, np.uint8)
        for i, layer in enumerate(self.layers):
            rows = self.raw_k(record, i)
            rows[:] = self.rng.normal(size=rows.shape) * 10.0 ** self.rng.integers(-7, 4, rows.shape)
            table = self.table[i]
            if table is None:
                continue
            own = rows[slot0 : slot0 + len(cells)].astype(np.float64)
            cos, sin = np.moveaxis(table[pos0 : pos0 + len(cells), None].astype(np.float64), -1, 0)
            first, second = layer.pairs()
            with np.errstate(divide="ignore", invalid="ignore"):
                partner = np.where(first % 3 == 0, cos / sin, -sin / cos) * own[..., first]
            fits = np.isfinite(partner) & (np.abs(partner) < 60000) & (first % 5 > 0)
            own[..., second] = np.where(fits, partner, own[..., second])
            rows[slot0 : slot0 + len(cells)] = own
        return RestoreBlock(record, cells, slot0, pos0)

    def raw_k(self, record: NDArray[np.uint8], i: int) -> NDArray[np.floating]:
        at = self.native[i]
        rows = record[at.k_offset : at.k_offset + self.n_slots * at.k_stride].view(self.dtype)
        return rows.reshape(self.n_slots, at.n_head_kv, at.d)

    def restore(self, blocks: list[RestoreBlock], form: RopeForm, isa: Isa, n_threads: int = 1) -> None:
        table = KERNELS.restore_layers(self.native, self.raw_k_type)
        KERNELS.restore_f16(table, blocks, self.n_cells, form, n_threads=n_threads, isa=isa)

    def expected(self, blocks: list[RestoreBlock], form: RopeForm) -> list[tuple[Rows, NDArray[np.uint8]]]:
        out = []
        for i, layer in enumerate(self.layers):
            k, v = np.full_like(self.k[i], 7), np.full_like(self.v[i], 9)
            at = self.native[i]
            for block in blocks:
                slots = slice(block.slot0, block.slot0 + len(block.cells))
                x = self.raw_k(block.record, i)[slots].astype(np.float32)
                y = x.copy()
                if layer.n_dims:
                    table = self.table[i]
                    assert table is not None
                    turn = table[block.pos0 : block.pos0 + len(block.cells), None]
                    first, second = layer.pairs()
                    y[..., first], y[..., second] = rotated(
                        x[..., first], x[..., second], turn[..., 0], turn[..., 1], form
                    )
                with np.errstate(over="ignore"):
                    k[block.cells] = y.astype(np.float16).reshape(len(block.cells), layer.n_head_kv * layer.d)
                rows = block.record[at.v_offset : at.v_offset + self.n_slots * at.v_row].reshape(
                    self.n_slots, at.v_row
                )
                v[block.cells] = rows[slots]
            out.append((k, v))
        return out

    def check(self, blocks: list[RestoreBlock], form: RopeForm, isa: Isa, n_threads: int = 1) -> None:
        self.restore(blocks, form, isa, n_threads)
        for i, (k, v) in enumerate(self.expected(blocks, form)):
            np.testing.assert_array_equal(self.k[i].view(np.uint16), k.view(np.uint16), f"K of layer {i}")
            np.testing.assert_array_equal(self.v[i], v, f"V of layer {i}")


def some_layers(pairing: Pairing) -> list[Layer]:
    """Whole heads, and heads turned in part with a remainder for every vector width."""
    return [
        Layer(3, 64, 64, 0, pairing, 384),
        Layer(2, 80, 54, 6, pairing, 20),
        Layer(1, 24, 0, 0, pairing, 48),
    ]


@pytest.mark.parametrize("raw_k_type", ["f16", "f32"])
@pytest.mark.parametrize("pairing", Pairing, ids=lambda pairing: pairing.name)
@pytest.mark.parametrize("form", RopeForm, ids=lambda form: form.name)
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_every_form_equals_its_float32_model(
    isa: Isa, form: RopeForm, pairing: Pairing, raw_k_type: str
) -> None:
    cache = Cache(some_layers(pairing), raw_k_type, seed=5)
    cells = cache.rng.permutation(cache.n_cells).astype(np.int32)
    blocks = [
        cache.block(cells[:8], 0, 0),
        cache.block(cells[8:13], 3, 290),
        cache.block(np.sort(cells[13:21]), 0, 17),
        cache.block(cells[:0], 0, 17),
    ]
    cache.check(blocks, form, isa)


@pytest.mark.parametrize("raw_k_type", ["f16", "f32"])
@pytest.mark.parametrize("pairing", Pairing, ids=lambda pairing: pairing.name)
def test_the_forms_differ_on_these_rows(pairing: Pairing, raw_k_type: str) -> None:
    """Otherwise the test above would show nothing."""
    results = []
    for form in RopeForm:
        cache = Cache(some_layers(pairing), raw_k_type, seed=5)
        cache.restore([cache.block(np.arange(8, dtype=np.int32), 0, 290)], form, Isa.AUTO)
        results.append([k.tobytes() for k in cache.k[:2]])
    for layer in range(2):
        assert len({result[layer] for result in results}) == len(RopeForm)


@hypothesis_settings(max_examples=60)
@given(st.data())
def test_any_shape_block_and_thread_count(data: st.DataObject) -> None:
    pairing = data.draw(st.sampled_from(Pairing))
    layers = []
    for _ in range(data.draw(st.integers(1, 4))):
        d = data.draw(st.sampled_from([2, 8, 30, 64, 96]))
        n_dims = 2 * data.draw(st.integers(0, d // 2))
        rot0 = data.draw(st.integers(0, d - n_dims)) if n_dims else 0
        layers.append(
            Layer(data.draw(st.integers(1, 3)), d, n_dims, rot0, pairing, data.draw(st.integers(0, 70)))
        )
    cache = Cache(layers, data.draw(st.sampled_from(["f16", "f32"])), data.draw(st.integers(0, 999)))
    cells = cache.rng.permutation(cache.n_cells).astype(np.int32)
    blocks, used = [], 0
    for _ in range(data.draw(st.integers(0, 6))):
        n = data.draw(st.integers(0, 8))
        own = cells[used : used + n]
        used += n
        slot0 = data.draw(st.integers(0, 8 - n))
        if data.draw(st.booleans()):
            own = np.sort(own)
        blocks.append(cache.block(own, slot0, data.draw(st.integers(0, N_POSITIONS - n))))
    cache.check(
        blocks,
        data.draw(st.sampled_from(RopeForm)),
        data.draw(st.sampled_from(ISAS)),
        data.draw(st.integers(1, 4)),
    )


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_every_float16_and_the_ties_between_them_are_rounded_as_numpy_does(isa: Isa) -> None:
    """Conversion alone (a layer without rotation) in both directions."""
    layer = Layer(1, 8192, 0, 0, Pairing.ADJACENT, 0)
    cache = Cache([layer], "f32", seed=0)
    all_halves = np.arange(0x10000, dtype=np.uint32).astype(np.uint16).view(np.float16)
    finite = np.where(np.isfinite(all_halves), all_halves, np.float16(0)).astype(np.float32)
    record = np.zeros(cache.nbytes, np.uint8)
    step = np.float32(2**-13)
    for values in (
        finite,
        finite * (1 + step),
        finite * (1 + step / 2),
        finite * (1 - step),
        finite + finite,
    ):
        cache.raw_k(record, 0)[:] = values.reshape(8, 1, 8192)
        cache.check([RestoreBlock(record, np.arange(8, dtype=np.int32), 0, 0)], RopeForm.PLAIN, isa)
    halves = Cache([layer], "f16", seed=0)
    halves.raw_k(record, 0)[:] = all_halves.reshape(8, 1, 8192)
    halves.restore(
        [RestoreBlock(record[: halves.nbytes], np.arange(8, dtype=np.int32), 0, 0)], RopeForm.PLAIN, isa
    )
    assert halves.k[0][:8].tobytes() == all_halves.tobytes()


def test_what_is_out_of_range_is_refused_before_anything_is_written() -> None:
    cache = Cache(some_layers(Pairing.HALVES), "f16", seed=2)
    good = cache.block(np.arange(8, dtype=np.int32), 0, 0)
    bad = [
        RestoreBlock(good.record, np.array([10, 64], np.int32), 0, 0),  # no such cell
        RestoreBlock(good.record, np.array([-1], np.int32), 0, 0),
        RestoreBlock(good.record, np.array([20], np.int32), -1, 0),  # no such slot
        RestoreBlock(good.record, np.array([20, 21], np.int32), 0, N_POSITIONS - 1),  # past the table
        RestoreBlock(good.record, np.array([20], np.int32), 0, -1),
    ]
    for block in bad:
        with pytest.raises(ValueError, match="out of range"):
            cache.restore([good, block], RopeForm.PLAIN, Isa.AUTO)
    with pytest.raises(ValueError, match="out of range"):
        cache.restore([good], 5, Isa.AUTO)  # type: ignore[arg-type]
    assert all((k == 7).all() for k in cache.k) and all((v == 9).all() for v in cache.v)
    missing = Isa(KERNELS.best_isa + 1) if KERNELS.best_isa < Isa.AVX512 else 9
    with pytest.raises(ValueError, match="instruction set"):
        cache.restore([good], RopeForm.PLAIN, missing)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        cache.restore([RestoreBlock(good.record[::2], good.cells, 0, 0)], RopeForm.PLAIN, Isa.AUTO)

"""Raw K on disk in smaller types: how far it is off, and that rounding happens once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from kvmem_llama.errors import InvalidOption
from kvmem_llama.native.layout import LayerInfo, RecordLayout
from kvmem_llama.store.host import HostStore
from kvmem_llama.store.raw_k import RawK

N = 64 * 96  # elements of raw K in a record
N_V = 512
BOUND = {"bf16": 2e-3, "q8_0": 1e-2}  # relative L2 error


def record(rows: NDArray[np.floating], row_type: str) -> NDArray[np.uint8]:
    k = rows.astype("<f2" if row_type == "f16" else "<f4").view(np.uint8)
    return np.concatenate([k, np.arange(N_V, dtype=np.uint8)])


def codec(row_type: str, stored_type: str, n: int = N) -> RawK:
    return RawK(row_type, stored_type, n * (2 if row_type == "f16" else 4), N_V)


def k_of(record: NDArray[np.uint8], row_type: str) -> NDArray[np.float64]:
    return record[:-N_V].view("<f2" if row_type == "f16" else "<f4").astype(np.float64)


def rows(seed: int = 0) -> NDArray[np.float64]:
    """Keys have a few large channels."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(N // 64, 64)) * np.exp(rng.normal(size=64)).reshape(1, 64)


@pytest.mark.parametrize("row_type", ["f16", "f32"])
@pytest.mark.parametrize("stored_type", ["bf16", "q8_0"])
def test_rounding_is_within_the_bound_of_the_type_and_leaves_v_alone(row_type: str, stored_type: str) -> None:
    raw_k = codec(row_type, stored_type)
    before = record(rows().reshape(-1), row_type)
    after = before.copy()
    raw_k.round(after)
    exact, rounded = k_of(before, row_type), k_of(after, row_type)
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 0 < error <= BOUND[stored_type]
    np.testing.assert_array_equal(after[-N_V:], before[-N_V:])


@pytest.mark.parametrize("row_type", ["f16", "f32"])
@pytest.mark.parametrize("stored_type", ["bf16", "q8_0"])
def test_what_is_read_is_what_was_rounded_and_rounding_it_again_changes_nothing(
    row_type: str, stored_type: str
) -> None:
    raw_k = codec(row_type, stored_type)
    for seed, size in enumerate([1.0, 1e-7, 1e-5, 1e-3, 30.0, 3000.0]):
        kept = record((rows(seed) * size).clip(-65504, 65504).reshape(-1), row_type)
        raw_k.round(kept)
        stored = raw_k.encode(kept)
        assert stored.nbytes == raw_k.stored_nbytes < kept.nbytes or stored_type == "bf16"
        np.testing.assert_array_equal(raw_k.decode(stored), kept)
        again = kept.copy()
        raw_k.round(again)
        np.testing.assert_array_equal(again, kept)


def test_every_scale_of_q8_0_is_found_again_in_rows_of_f16() -> None:
    largest = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16)  # every one that there is
    blocks = np.zeros((len(largest), 32), np.float16)
    blocks[:, 0] = largest
    blocks[:, 1:] = largest[:, np.newaxis] * np.random.default_rng(1).uniform(-1, 1, (1, 31))
    raw_k = codec("f16", "q8_0", blocks.size)
    kept = record(blocks.reshape(-1), "f16")
    raw_k.round(kept)
    assert np.isfinite(k_of(kept, "f16")).all()
    np.testing.assert_array_equal(raw_k.decode(raw_k.encode(kept)), kept)


def test_every_bf16_number_survives_rows_of_f16() -> None:
    values = np.arange(0, 0x7F80, dtype=np.uint32) << np.uint32(16)
    numbers = values.view(np.float32)
    kept = record(numbers[numbers <= 65504], "f16")
    raw_k = codec("f16", "bf16", int((numbers <= 65504).sum()))
    np.testing.assert_array_equal(raw_k.decode(raw_k.encode(kept)), kept)


@pytest.mark.parametrize(("row_type", "most"), [("f16", 65504.0), ("f32", 3.4028234e38)])
def test_keys_too_large_for_bf16_become_the_largest_that_rows_can_hold(row_type: str, most: float) -> None:
    """Rounded to the nearest bf16 they would be infinite."""
    raw_k = codec(row_type, "bf16", 96)
    values = np.linspace(0.99, 1.0, 48) * most
    kept = record(np.concatenate([values, -values]), row_type)
    before = k_of(kept, row_type)
    raw_k.round(kept)
    found = k_of(kept, row_type)
    assert np.isfinite(found).all() and np.abs(found).max() > 0.99 * most
    np.testing.assert_allclose(found, before, rtol=2**-8)
    np.testing.assert_array_equal(raw_k.decode(raw_k.encode(kept)), kept)


@pytest.mark.parametrize(
    ("stored_type", "ggml"), [("bf16", GGMLQuantizationType.BF16), ("q8_0", GGMLQuantizationType.Q8_0)]
)
def test_ggml_reads_what_is_stored(stored_type: str, ggml: GGMLQuantizationType) -> None:
    raw_k = codec("f32", stored_type)
    kept = record(rows().reshape(-1), "f32")
    raw_k.round(kept)
    found = quants.dequantize(raw_k.encode(kept)[:-N_V], ggml)
    np.testing.assert_array_equal(found, k_of(kept, "f32").astype(np.float32))


def test_the_type_of_the_rows_is_stored_as_it_is() -> None:
    raw_k = codec("f16", "f16")
    kept = record(rows().reshape(-1), "f16")
    assert raw_k.is_plain and raw_k.encode(kept) is kept and raw_k.decode(kept) is kept


def test_a_store_in_ram_keeps_the_rows_that_a_store_on_disk_would() -> None:
    raw_k = codec("f16", "q8_0")
    before = record(rows().reshape(-1), "f16")
    store = HostStore(raw_k)
    found = store.get(store.put(before.copy()))
    np.testing.assert_array_equal(found, raw_k.decode(raw_k.encode(before)))


def layer(d_k: int) -> LayerInfo:
    return LayerInfo(
        il=0, cache=0, rope=True, n_head=2, n_head_kv=2, d_k=d_k, d_v=64, raw_k_row=2 * d_k * 2, k_row=1,
        v_row=256, scale=1.0, type_k=1, type_v=1, k_rotated=False, rope_params=(0,) * 16, rope_factors=False,
        k_base=0, v_base=0,
    )  # fmt: skip


def test_keys_that_do_not_fit_a_type_and_types_that_do_not_exist_are_refused_by_name() -> None:
    layout = RecordLayout.of([layer(64)], 32, "q8_0")
    assert (layout.raw_k_type, layout.stored_k_type) == ("f16", "q8_0")
    raw_k = RawK.of(layout)
    assert raw_k.record_nbytes == layout.nbytes
    assert layout.nbytes - raw_k.stored_nbytes == 32 * 2 * 64 * 2 - 32 * 2 * 2 * 34
    with pytest.raises(InvalidOption, match="width 80"):
        RecordLayout.of([layer(64), dataclasses.replace(layer(80), il=1)], 32, "q8_0")
    assert RecordLayout.of([layer(80)], 32, "bf16").stored_k_type == "bf16"
    with pytest.raises(InvalidOption, match=r"q5_1.*bf16"):
        RecordLayout.of([layer(64)], 32, "q5_1")

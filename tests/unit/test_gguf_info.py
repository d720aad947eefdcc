"""Model facts from GGUF headers, and files that are damaged, hostile or not models at all."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import SHAPES, Shape, truncate, write_model

from kvmem_llama import gguf_header
from kvmem_llama.errors import KvmemError, ModelCorrupt, ModelError, ModelNotFound, ModelUnsupported
from kvmem_llama.gguf_header import GGML_TYPES, read_header
from kvmem_llama.gguf_info import check_policy, read_model_info


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / f"{name}.gguf", name) for name in SHAPES}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_facts_are_those_the_file_was_written_with(models: dict[str, Path], name: str) -> None:
    shape, info = SHAPES[name], read_model_info(models[name])
    assert (info.arch, info.n_layer, info.n_embd, info.n_head) == (
        name, shape.n_layer, shape.n_embd, shape.n_head,
    )  # fmt: skip
    has_kv = [name != "lfm2" or i % 2 for i in range(shape.n_layer)]  # lfm2: every second layer has none
    assert info.n_head_kv == tuple(shape.n_head_kv if has else 0 for has in has_kv)
    assert (info.d_k, info.d_v, info.n_ctx_train) == (shape.d, shape.d, shape.n_ctx_train)
    assert info.n_swa == (shape.n_swa if name == "gemma3" else 0)
    assert info.file_size == models[name].stat().st_size
    assert (info.tokenizer, info.has_chat_template, info.n_parts) == ("gpt2/gpt-2", True, 1)
    assert info.n_vocab == 269
    assert info.quantisation == "F32"
    assert info.n_params == sum(int(t.n_elements) for t in gguf.GGUFReader(models[name]).tensors)


def test_header_agrees_with_the_gguf_package(models: dict[str, Path]) -> None:
    theirs, ours = gguf.GGUFReader(models["qwen3"]), read_header(models["qwen3"])
    assert [(t.name, int(t.n_bytes), int(t.data_offset)) for t in theirs.tensors] == [
        (t.name, t.nbytes, ours.data_start + t.offset) for t in ours.tensors
    ]
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}


def test_type_sizes_are_those_of_the_gguf_package() -> None:
    for number, (block, size) in gguf.GGML_QUANT_SIZES.items():
        assert GGML_TYPES[int(number)] == (number.name, block, size)


def test_bytes_of_a_token_count_every_kv_head_of_every_layer(models: dict[str, Path]) -> None:
    info = read_model_info(models["llama"])
    assert info.cell_bytes(16, 16) == 2 * 2 * (64 + 64) * 2
    assert info.cell_bytes(8.5, 16) == 2 * 2 * (64 * 8.5 + 64 * 16) / 8


def test_decoders_with_rotary_positions_suit_every_policy(models: dict[str, Path]) -> None:
    for name in ("llama", "qwen2", "qwen3", "gemma3", "frobnicate"):
        for policy in ("kvmem", "full_context", "sliding_window"):
            check_policy(read_model_info(models[name]), policy)


def test_learned_positions_are_refused_by_name_with_what_still_works(models: dict[str, Path]) -> None:
    info = read_model_info(models["gpt2"])
    with pytest.raises(ModelUnsupported, match=r"gpt2.*learned.*full_context.*sliding_window"):
        check_policy(info, "kvmem")
    check_policy(info, "full_context")
    check_policy(info, "sliding_window")


def test_an_encoder_is_refused_under_every_policy(models: dict[str, Path]) -> None:
    for policy in ("kvmem", "full_context", "sliding_window"):
        with pytest.raises(ModelUnsupported, match=r"bert.*encoder"):
            check_policy(read_model_info(models["bert"]), policy)


def test_a_model_without_vocabulary_is_refused(tmp_path: Path) -> None:
    info = read_model_info(write_model(tmp_path / "m.gguf", vocabulary=False))
    with pytest.raises(ModelUnsupported, match="vocabulary"):
        check_policy(info, "full_context")


@pytest.mark.parametrize("special", [("Ġt",), ("Ġt\0more",), ("[EMPTY_269]", "")])
def test_two_tokens_with_one_text_are_refused_before_llama_cpp_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, special: tuple[str, ...]
) -> None:
    monkeypatch.setattr("tiny_models.SPECIAL", ("<|im_start|>", "<|im_end|>", *special))
    path = write_model(tmp_path / "m.gguf")
    read_model_info(path)  # quick: does not look at tokens
    with pytest.raises(ModelCorrupt, match=r"tokens \d+ and 26\d of its vocabulary are both"):
        read_model_info(path, tokens=True)


def test_tokens_of_sound_models_are_accepted(models: dict[str, Path]) -> None:
    for name in ("llama", "gemma3"):
        assert read_model_info(models[name], tokens=True) == read_model_info(models[name])


def test_a_file_that_says_it_has_no_tokenizer_is_refused_whatever_tokens_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda *_: None)
    add = gguf.GGUFWriter.add_tokenizer_model
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", lambda self, _name: add(self, "no_vocab"))
    info = read_model_info(write_model(tmp_path / "m.gguf"))
    with pytest.raises(ModelUnsupported, match="vocabulary"):
        check_policy(info, "full_context")


def test_a_gguf_file_that_is_no_language_model_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_type("adapter")
    _write(writer)
    with pytest.raises(ModelUnsupported, match="adapter"):
        read_model_info(tmp_path / "lora.gguf")


def test_missing_file_folder_device_and_impossible_names_are_not_found(tmp_path: Path) -> None:
    for path, why in (
        (tmp_path / "none.gguf", "no such file"),
        (tmp_path, "folder"),
        (Path("/dev/null"), "regular"),
        (tmp_path / "a\0b", "null"),
        (tmp_path / ("x" * 5000), "long"),
    ):
        with pytest.raises(ModelNotFound, match=why):
            read_model_info(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_an_unreadable_file_is_not_found(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    path.chmod(0)
    with pytest.raises(ModelNotFound, match="denied"):
        read_model_info(path)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"GG", "starts with"),
        (b"PK\x03\x04 a zip file", "starts with"),
        (b"GGUF", "ends inside"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 0x1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 1), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "claims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "ends inside"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "architecture"),
    ],
)
def test_what_is_not_gguf_is_said_to_be_so(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelCorrupt, match=why):
        read_model_info(path)


@pytest.mark.parametrize("keep", [0.001, 0.1, 0.5, 0.9, 0.999999])
def test_a_truncated_file_is_said_to_be_cut_short(
    models: dict[str, Path], tmp_path: Path, keep: float
) -> None:
    with pytest.raises(ModelCorrupt, match=r"cut short|ends inside"):
        read_model_info(truncate(models["llama"], tmp_path / "cut.gguf", keep))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("llama.block_count", 0, "block_count"),
        ("llama.block_count", 100_000, "100000 layers"),
        ("llama.embedding_length", "wide", "embedding_length"),
        ("llama.attention.head_count", [4, 4, "x"], "head_count"),
        ("llama.context_length", None, "context_length"),
        ("tokenizer.chat_template", 7, "chat_template"),
        ("general.alignment", 33, "power of two"),
    ],
)
def test_wrong_metadata_is_named(tmp_path: Path, key: str, value: object, why: str) -> None:
    path = tmp_path / "m.gguf"
    metadata = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 64,
        "llama.context_length": 128, "llama.attention.head_count": 1, "tokenizer.ggml.tokens": ["a", "b"],
    } | {key: value}  # fmt: skip
    _write_raw(path, {k: v for k, v in metadata.items() if v is not None})
    with pytest.raises(ModelCorrupt, match=why):
        read_model_info(path)


def test_a_split_model_needs_all_its_parts(tmp_path: Path) -> None:
    for i in range(2):
        writer = gguf.GGUFWriter(tmp_path / f"m-{i + 1:05}-of-00002.gguf", "llama")
        for key, number in (("block_count", 2), ("embedding_length", 64), ("context_length", 128)):
            writer.add_uint32(f"llama.{key}", number)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 2)
        _write(writer, name=f"t{i}")
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    info = read_model_info(first)
    assert (info.n_parts, info.n_params) == (2, 64)
    with pytest.raises(ModelNotFound, match=r"part 2 of 2.*m-00001"):
        read_model_info(second)
    truncate(second, second, 0.9)
    with pytest.raises(ModelCorrupt, match="cut short"):
        read_model_info(first)
    second.unlink()
    with pytest.raises(ModelNotFound, match="missing"):
        read_model_info(first)


def test_the_fingerprint_tells_models_apart_and_not_copies(tmp_path: Path) -> None:
    one = write_model(tmp_path / "1.gguf", seed=1)
    prints = {
        read_model_info(path).fingerprint
        for path in (one, write_model(tmp_path / "2.gguf", seed=1), write_model(tmp_path / "3.gguf", seed=2))
    }
    assert len(prints) == 2
    assert read_model_info(one).fingerprint in prints


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return write_model(folder / "s.gguf", Shape(n_layer=1, n_head=1, n_head_kv=1, d=32, n_ff=32))


FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # the file is rewritten by every example


def _only_our_errors(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        check_policy(read_model_info(path), "kvmem")
    except KvmemError as error:
        assert isinstance(error, ModelError)
        assert len(str(error)) < 1000


@FUZZ
@given(data=st.binary(max_size=400))
def test_random_bytes_after_the_magic_give_only_our_errors(tmp_path: Path, data: bytes) -> None:
    _only_our_errors(tmp_path / "f.gguf", b"GGUF\x03\0\0\0" + data)


@FUZZ
@given(keep=st.floats(0, 1))
def test_any_truncation_gives_only_our_errors(tmp_path: Path, small: Path, keep: float) -> None:
    data = small.read_bytes()
    _only_our_errors(tmp_path / "f.gguf", data[: int(len(data) * keep**4)])  # most cuts in the header


@FUZZ
@given(spots=st.lists(st.tuples(st.integers(0, 12_000), st.binary(min_size=1, max_size=9)), max_size=4))
def test_any_overwritten_bytes_give_only_our_errors(
    tmp_path: Path, small: Path, spots: list[tuple[int, bytes]]
) -> None:
    data = bytearray(small.read_bytes())
    for at, what in spots:
        data[at : at + len(what)] = what
    _only_our_errors(tmp_path / "f.gguf", bytes(data))


def test_a_huge_hostile_file_is_refused_quickly_and_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gguf"
    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a")
        file.write(struct.pack("<IIQ", 9, 8, 2**31))  # two thousand million strings
        file.truncate(1 << 36)  # sparse
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(ModelCorrupt, match="claims"):
        read_model_info(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert time.monotonic() - start < 5


def test_kept_metadata_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_KEPT", 1 << 20)
    path = tmp_path / "wide.gguf"
    texts: dict[str, object] = {f"k{i}": "x" * 1000 for i in range(2000)}
    _write_raw(path, {"general.architecture": "llama"} | texts)
    with pytest.raises(ModelCorrupt, match="takes more than 1 MiB"):
        read_model_info(path)


def test_a_long_text_is_clipped_and_reading_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    _write_raw(path, {"general.architecture": "llama", "tokenizer.huggingface.json": "x" * (3 << 20), "z": 5})
    header = read_header(path)
    assert len(str(header.metadata["tokenizer.huggingface.json"])) == 1 << 20
    assert header.metadata["z"] == 5


def _write(writer: gguf.GGUFWriter, name: str = "t") -> None:
    import numpy as np

    writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_raw(path: Path, metadata: dict[str, object]) -> None:
    """A GGUF file with one tensor and this metadata, whose values need not suit their keys."""

    def text(value: str) -> bytes:
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    def value_of(value: object) -> bytes:
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, list):
            items = [str(item) for item in value]
            return struct.pack("<IIQ", 9, 8, len(items)) + b"".join(text(item) for item in items)
        assert isinstance(value, int)
        return struct.pack("<II", 4, value)

    body = b"GGUF" + struct.pack("<IQQ", 3, 1, len(metadata))
    body += b"".join(text(key) + value_of(value) for key, value in metadata.items())
    body += text("t") + struct.pack("<IQIQ", 1, 8, 0, 0)
    body += b"\0" * (-len(body) % 32) + b"\0" * 32
    path.write_bytes(body)

"""What a GGUF file says about its model, and whether a policy can work with it.

Only headers are read (those of all parts of a split model): a fraction of a second for a model of any size.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from .errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from .gguf_header import GgufHeader, LongArray, TensorEntry, Value, open_model_file, read_header
from .gguf_vocabulary import TOKENS, check_vocabulary

# Architectures without a causal decoder (src/llama-arch.cpp); others say so with `<arch>.attention.causal`.
ENCODERS: Final = frozenset({
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
    "eurobert", "gemma-embedding", "llama-embed", "t5", "t5encoder", "wavtokenizer-dec", "clip",
})  # fmt: skip

NO_TOKENIZER: Final = frozenset({"none", "no_vocab"})  # llama.cpp then ignores any tokens of the file

_MERGES: Final = "tokenizer.ggml.merges"
_SPLIT_NAME: Final = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")
_N_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of one model file. Lengths in tokens, sizes in bytes, widths in elements."""

    path: Path
    arch: str
    name: str
    n_layer: int
    n_embd: int
    n_head: int  # of the widest layer
    n_head_kv: tuple[int, ...]  # per layer; 0 for a layer without attention
    d_k: int
    d_v: int
    n_ctx_train: int
    n_swa: int  # tokens of the sliding window; 0: none
    n_vocab: int  # 0: no vocabulary in the file
    tokenizer: str  # "model/pre-tokenizer"; empty: none
    has_chat_template: bool
    learned_positions: bool
    causal: bool
    file_size: int  # all parts together
    n_parts: int
    n_params: int
    quantisation: str  # type of most weights
    fingerprint: str  # blake2b-128 of the headers, sizes and samples of the data, hexadecimal
    n_ff: int = 0  # width of the widest feed-forward layer
    n_merges: int = 0  # of the tokenizer
    layers_size: int = 0  # weights of all layers together; embedding and output are not of them
    matrix_sizes: tuple[tuple[str, int], ...] = ()  # type -> weights in matrices that are multiplied with

    def cell_bytes(self, k_bits: float, v_bits: float) -> float:
        """Bytes of one token's K and V in all layers, at these widths in bits per element."""
        return sum(self.n_head_kv) * (self.d_k * k_bits + self.d_v * v_bits) / 8


def read_model_info(path: Path, *, tokens: bool = False) -> ModelInfo:
    """Facts of the model at `path`; for a split model, the path of its first part.

    tokens: also check every token, as must be done before llama.cpp loads the file; it takes a moment.
    Raises ModelNotFound, ModelCorrupt, and ModelUnsupported for a GGUF file that is not a language model.
    """
    header = read_header(path)
    meta = _Metadata(path, header)
    arch = meta.text("general.architecture")
    if not arch:
        raise ModelCorrupt(path, "it does not name its architecture (general.architecture)")
    kind = meta.text("general.type", "model")
    if kind != "model" or arch == "clip":
        raise ModelUnsupported(
            arch, f"{str(path)!r} holds a {'projector' if kind == 'model' else kind:.40}, no language model",
            hint="Give the model itself with -m.",
        )  # fmt: skip
    if tokens:
        check_vocabulary(path, header)
    parts = _parts(path, meta.whole("split.count", 1), meta.whole("split.no", 0))
    headers = [header] + [read_header(part) for part in parts[1:]]
    tensors = [tensor for part in headers for tensor in part.tensors]
    if not tensors:
        raise ModelCorrupt(path, "it holds no tensors (a vocabulary alone?)")

    n_layer = meta.positive(f"{arch}.block_count")
    n_embd = meta.positive(f"{arch}.embedding_length")
    heads = meta.per_layer(f"{arch}.attention.head_count", n_layer, None)
    n_head = max(heads)
    width = n_embd // n_head if n_head else 0
    sizes = [part.file_size for part in headers]
    return ModelInfo(
        path=path,
        arch=arch,
        name=meta.text("general.name"),
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=meta.per_layer(f"{arch}.attention.head_count_kv", n_layer, heads),
        d_k=meta.whole(f"{arch}.attention.key_length", width),
        d_v=meta.whole(f"{arch}.attention.value_length", width),
        n_ctx_train=meta.positive(f"{arch}.context_length"),
        n_swa=meta.whole(f"{arch}.attention.sliding_window", 0),
        n_vocab=meta.length(TOKENS),
        tokenizer="/".join(
            filter(None, (meta.text("tokenizer.ggml.model"), meta.text("tokenizer.ggml.pre")))
        ),
        has_chat_template=bool(meta.text("tokenizer.chat_template")),
        learned_positions=any(tensor.name == "position_embd.weight" for tensor in tensors),
        causal=arch not in ENCODERS and meta.flag(f"{arch}.attention.causal", True),
        file_size=sum(sizes),
        n_parts=len(parts),
        n_params=sum(tensor.n_elements for tensor in tensors),
        quantisation=_quantisation(tensors),
        fingerprint=_fingerprint(parts, headers),
        n_ff=meta.whole(f"{arch}.feed_forward_length", 0),
        n_merges=meta.length(_MERGES),
        layers_size=sum(tensor.nbytes or 0 for tensor in tensors if tensor.name.startswith("blk.")),
        matrix_sizes=_matrix_sizes(tensors),
    )


def check_policy(info: ModelInfo, policy: str) -> None:
    """Raises ModelUnsupported if this model cannot run under `policy`; the hint says what still works.

    What only the graph shows (no raw K found, no rotation to undo) is found out by the engine.
    """
    if not info.causal:
        raise ModelUnsupported(
            info.arch, "it is an encoder; it does not write text",
            hint="No policy works with it. Use a decoder (llama, qwen, gemma ...) instead.",
        )  # fmt: skip
    if not info.n_vocab or info.tokenizer.partition("/")[0] in NO_TOKENIZER:
        raise ModelUnsupported(
            info.arch, "the file holds no vocabulary", hint="Convert the model again, with its tokenizer."
        )
    if info.learned_positions and policy == "kvmem":
        raise ModelUnsupported(
            info.arch, "its positions are learned, so its keys cannot be moved to other positions",
            hint="These still work: --policy full_context, --policy sliding_window.",
        )  # fmt: skip


class _Metadata:
    """Typed reads of metadata; a key of the wrong type is damage."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path = path
        self._values = header.metadata

    def _bad(self, key: str, value: Value | None) -> ModelCorrupt:
        shown = "missing" if value is None else f"{value!r:.60}"
        return ModelCorrupt(self._path, f"metadata key {key!r:.80} is {shown}")

    def text(self, key: str, default: str = "") -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self._bad(key, value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value)
        return value

    def whole(self, key: str, default: int) -> int:
        value = self._values.get(key, default)
        if isinstance(value, tuple) and value:  # some architectures give it per layer
            value = max((part for part in value if type(part) is int), default=-1)
        if type(value) is not int or not 0 <= value < 2**31:
            raise self._bad(key, value)
        return value

    def positive(self, key: str) -> int:
        value = self._values.get(key)
        if type(value) is not int or not 0 < value < 2**31:
            raise self._bad(key, value)
        return value

    def per_layer(self, key: str, n_layer: int, default: tuple[int, ...] | None) -> tuple[int, ...]:
        if n_layer > 4096:
            raise ModelCorrupt(self._path, f"it claims {n_layer} layers")
        value = self._values.get(key, default if default is not None else 0)
        row = value if isinstance(value, tuple) else (value,) * n_layer
        whole = tuple(part for part in row if type(part) is int and 0 <= part < 2**31)
        if len(whole) != len(row) or len(row) < n_layer:
            raise self._bad(key, value)
        return whole[:n_layer]

    def length(self, key: str) -> int:
        value = self._values.get(key, ())
        if isinstance(value, LongArray):
            return value.length
        if not isinstance(value, tuple):
            raise self._bad(key, value)
        return len(value)


def _parts(path: Path, count: int, number: int) -> list[Path]:
    """Paths of all parts of a split model, as llama.cpp's llama_split_path names them."""
    if count <= 1:
        return [path]
    match = _SPLIT_NAME.match(path.name)
    if match is None or int(match[3]) != count:
        raise ModelNotFound(
            path, f"one of {count} parts, but not named like model-{number + 1:05}-of-{count:05}.gguf"
        )
    names = [path.with_name(f"{match[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    if number != 0:
        raise ModelNotFound(
            path, f"this is part {number + 1} of {count}", hint=f"Give the first part: {names[0]}"
        )
    for name in names:
        if not name.is_file():
            raise ModelNotFound(name, f"this part of a model split into {count} is missing")
    return names


def _quantisation(tensors: list[TensorEntry]) -> str:
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.type_name] += tensor.n_elements
    return counts.most_common(1)[0][0]


def _matrix_sizes(tensors: list[TensorEntry]) -> tuple[tuple[str, int], ...]:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1 and not tensor.name.startswith("token_embd"):  # that one is looked up
            sizes[tensor.type_name] += tensor.nbytes or 0
    return tuple(sorted(sizes.items()))


def _fingerprint(parts: list[Path], headers: list[GgufHeader]) -> str:
    """Two models that differ in any header byte, in size or in the sampled data differ here.

    Samples tell fine-tunes apart whose headers are equal; all of a large file would take minutes to read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, header in zip(parts, headers, strict=True):
        digest.update(header.file_size.to_bytes(8, "little"))
        try:
            with open_model_file(path) as file:
                _digest_file(digest.update, file, header)
        except OSError as error:
            raise ModelCorrupt(path, f"reading failed: {error.strerror or error}") from None
    return digest.hexdigest()


def _digest_file(update: Callable[[bytes], None], file: BinaryIO, header: GgufHeader) -> None:
    left = header.data_start
    while left > 0 and (piece := file.read(min(left, 1 << 20))):
        update(piece)
        left -= len(piece)
    span = max(0, header.file_size - header.data_start - _SAMPLE_BYTES)
    for i in range(_N_SAMPLES):
        file.seek(header.data_start + span * i // (_N_SAMPLES - 1))
        update(file.read(_SAMPLE_BYTES))

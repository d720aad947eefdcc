"""What a family of workspaces is bound to: the model, the types of its cells and the layout of its records.

KV that was made with one of them means nothing to another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvmem_llama.errors import WorkspaceMismatch
from kvmem_llama.gguf_info import ModelInfo
from kvmem_llama.native.layout import LayerInfo, RecordLayout
from kvmem_llama.settings import Settings

from .index_file import IndexedLayer, IndexShape
from .raw_k import RawK

_GGML_TYPE: Final = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}

# Facts of a layer that its K and V depend on. Addresses and the number of query heads do not matter.
_LAYER_FACTS: Final = (
    "il", "cache", "rope", "n_head_kv", "d_k", "d_v", "raw_k_row", "v_row", "type_k", "type_v", "k_rotated",
    "rope_params", "rope_factors",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Binding:
    """Sizes in bytes, types as numbers of enum ggml_type. Two of them fit if they are equal."""

    model: str  # fingerprint of the file
    model_name: str
    arch: str
    block_size: int  # tokens
    raw_k_type: str
    cache_type_k: str
    cache_type_v: str
    rope: str  # overrides of the model's own
    layout: str  # hash over the layers' facts and the record's offsets
    k_type: int
    k_nbytes: int  # raw K of one record, as it is on disk
    v_type: int
    v_nbytes: int
    index_layers: tuple[tuple[int, int, int], ...]  # (layer number, KV heads, head size) of full attention

    @classmethod
    def of(
        cls, model: ModelInfo, layers: Sequence[LayerInfo], layout: RecordLayout, settings: Settings
    ) -> Binding:
        """The binding of an engine. layers, layout: as the hooks report them."""
        facts = [[getattr(layer, name) for name in _LAYER_FACTS] for layer in layers]
        offsets = [layout.block_size, layout.raw_k_type, layout.k_offsets, layout.v_offsets, layout.nbytes]
        raw_k = RawK.of(layout)
        if not raw_k.is_plain:
            offsets.append(layout.stored_k_type)
        text = json.dumps([_LAYER_FACTS, facts, offsets], sort_keys=True)
        v_nbytes = layout.nbytes - layout.k_nbytes
        base, scale = settings.rope_freq_base, settings.rope_freq_scale
        return cls(
            model=model.fingerprint,
            model_name=model.name or model.path.name,
            arch=model.arch,
            block_size=layout.block_size,
            raw_k_type=layout.stored_k_type,
            cache_type_k=settings.cache_type_k,
            cache_type_v=settings.cache_type_v,
            rope=f"base {base:g}, scale {scale:g}" if base or scale else "the model's",
            layout=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            k_type=_GGML_TYPE[layout.stored_k_type],
            k_nbytes=raw_k.stored_nbytes - v_nbytes,
            v_type=layers[0].type_v,
            v_nbytes=v_nbytes,
            index_layers=tuple(
                (layer.il, layer.n_head_kv, layer.d_k) for layer in layers if layer.cache == 0
            ),
        )

    @property
    def record_nbytes(self) -> int:
        return self.k_nbytes + self.v_nbytes

    @property
    def index_shape(self) -> IndexShape:
        return IndexShape(
            self.layout, self.block_size, tuple(IndexedLayer(*layer) for layer in self.index_layers)
        )

    def check(self, given: Binding) -> None:
        """Raises WorkspaceMismatch, naming both sides of everything that differs, if `given` does not fit."""
        mine, other = self._named(), given._named()
        differing = [name for name in mine if mine[name] != other[name]]
        if differing:
            raise WorkspaceMismatch(
                " and ".join(differing),
                ", ".join(mine[name] for name in differing),
                ", ".join(other[name] for name in differing),
            )
        if self != given:  # for what is not named above, which follows from it
            raise WorkspaceMismatch("record layout", self.layout, given.layout)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Binding:
        """Raises ValueError if the text is not a binding."""
        try:
            facts: dict[str, Any] = json.loads(text)
            layers = tuple((int(il), int(n), int(d)) for il, n, d in facts.pop("index_layers"))
            binding = cls(index_layers=layers, **facts)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a binding: {error}") from error
        for field in dataclasses.fields(cls):
            kind = {"str": str, "int": int}.get(str(field.type), tuple)
            if not isinstance(getattr(binding, field.name), kind):
                raise ValueError(f"not a binding: {field.name}")
        if min(binding.block_size, binding.k_nbytes, binding.v_nbytes) <= 0:
            raise ValueError("not a binding: a size is not positive")
        return binding

    def _named(self) -> dict[str, str]:
        return {
            "model": f"{self.model_name} ({self.arch}, fingerprint {self.model[:16]})",
            "block size": f"{self.block_size} tokens",
            "raw K type": self.raw_k_type,
            "cache type of K": self.cache_type_k,
            "cache type of V": self.cache_type_v,
            "RoPE": self.rope,
        }

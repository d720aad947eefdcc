"""What llama_cpp.Llama holds its model and its context in, over those of an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ..engine.model import Model
from ..errors import EngineClosed


def model_of(internals: Any, model: Model, path: str, verbose: bool) -> Any:
    """A llama_cpp._internals.LlamaModel that does not own its model."""
    held = internals.LlamaModel.__new__(internals.LlamaModel)
    held.path_model, held.params, held.verbose = path, None, verbose
    held.model, held.vocab = model.pointer, model.vocab.pointer
    held.sampler, held.custom_samplers = None, []
    held._exit_stack = contextlib.ExitStack()
    return held


class Context:
    """The part of llama_cpp._internals.LlamaContext that llama_cpp.Llama and its chat handlers use. The cells
    are not its: tokens are dropped when others are evaluated in their place."""

    def __init__(self, n_ctx: int, forget: Callable[[], None], timings: Callable[[], None]) -> None:
        self._n_ctx = n_ctx
        self.kv_cache_clear = forget
        self.print_timings = timings

    def n_ctx(self) -> int:
        return self._n_ctx

    def pooling_type(self) -> int:
        return -1  # LLAMA_POOLING_TYPE_UNSPECIFIED

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        return True

    def reset_timings(self) -> None:
        pass


class Closed:
    """Stands where the model was: whatever is asked of it is refused."""

    def __getattr__(self, name: str) -> Any:
        raise EngineClosed("this Llama is closed", hint="Make a new one.")

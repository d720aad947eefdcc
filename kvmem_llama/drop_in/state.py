"""What llama_cpp.Llama saves and loads: tokens, logits, and a fork of the workspace that they lie in."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ..workspace import Workspace
from . import stock

if TYPE_CHECKING:
    from .evaluation import Evaluation
    from .llama import Llama


class State(stock.llama.LlamaState):  # type: ignore[misc]
    """A llama_cpp.LlamaState. In a file only its tokens and logits are kept."""

    _fork: Workspace | None = None

    @classmethod
    def of(cls, llama: Llama) -> State:
        """The state of `llama` now."""
        workspace = llama._evaluation.workspace
        state = cls(
            input_ids=llama._input_ids.copy(),
            scores=llama._scores.copy(),
            n_tokens=llama.n_tokens,
            llama_state=b"",
            llama_state_size=workspace.stats().store_bytes,
            seed=llama._seed,
        )
        if workspace.name is None:
            state._fork = workspace.fork()
            weakref.finalize(state, state._fork.close)
        return state

    def give_back(self, evaluation: Evaluation) -> None:
        """Makes the workspace of `evaluation` what it was."""
        if self._fork is None:
            return
        evaluation.finish()
        before, evaluation.workspace = evaluation.workspace, self._fork.fork()
        before.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_fork"}

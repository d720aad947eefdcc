"""What holds an answer to a form: a grammar, maybe one that waits for a trigger, and a limit on reasoning.

Both are samplers of libllama that act on each other as in llama.cpp's common/sampling.cpp: a grammar that
waits does not look at the reasoning, and what ends a reasoning may be what the grammar waits for.
"""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import InvalidOption, InvalidRequest
from ..native import chat_shim
from ..native.library import import_binding
from .vocab import Vocab


@dataclass(frozen=True, slots=True)
class GrammarTrigger:
    """Text or token at which a lazy grammar takes hold."""

    type: str  # "word", "pattern" (a regular expression), "pattern_full" (of the whole answer), "token"
    value: str
    token: int = -1  # only of the type "token"


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """GBNF that an answer obeys."""

    grammar: str
    lazy: bool = False  # only from the first trigger on
    triggers: tuple[GrammarTrigger, ...] = ()
    preserved_tokens: tuple[str, ...] = ()  # texts; a trigger that is one token must be among them
    prefill: str = ""  # text that ends the prompt and that the grammar begins with

    def request(self) -> dict[str, object]:
        return {
            "grammar": self.grammar,
            "grammar_lazy": self.lazy,
            "grammar_triggers": [asdict(trigger) for trigger in self.triggers],
            "preserved_tokens": self.preserved_tokens,
            "prefill": self.prefill,
        }


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """How an answer's reasoning is found, and where it ends at the latest."""

    start_tag: str
    end_tags: tuple[str, ...]  # the first one is forced when the budget is spent
    budget: int = -1  # tokens; -1: no limit
    message: str = ""  # forced before the end tag
    prefill: str = ""  # text that ends the prompt; it may begin the reasoning


class Constraint:
    """Grammar and reasoning of one answer. Owner thread of whoever made it; `close` frees it."""

    def __init__(self, vocab: Vocab, grammar: AnswerGrammar | None, reasoning: ReasoningLimit | None) -> None:
        """Raises InvalidOption for a grammar that llama.cpp cannot use."""
        self._llama: Any = import_binding()
        self._shim = chat_shim.load()
        self._vocab = vocab
        self._specs = grammar, reasoning
        self._is_lazy = grammar is not None and grammar.lazy
        self._grammar: Any = None
        self._reasoning: Any = None
        self._open()

    def _open(self) -> None:
        grammar, reasoning = self._specs
        try:
            if reasoning is not None:
                self._reasoning = self._shim.reasoning_sampler(self._vocab.pointer, asdict(reasoning))
            if grammar is not None:
                self._grammar = self._shim.grammar_sampler(self._vocab.pointer, grammar.request())
        except InvalidRequest as error:
            self.close()
            given = grammar.grammar[:60] if grammar else ""
            raise InvalidOption("grammar", given, error.why, hint="It must be GBNF with a root.") from error

    @property
    def is_waiting(self) -> bool:
        """The grammar does not apply to the next token, because the answer is reasoning."""
        return self._is_lazy and self._reasoning is not None and self._shim.is_reasoning(self._reasoning)

    def force(self, candidates: Any) -> None:
        """Leaves one candidate where a reasoning has to end. candidates: llama_token_data_array *."""
        if self._reasoning is not None:
            self._llama.llama_sampler_apply(self._pointer(self._reasoning), candidates)

    def restrict(self, candidates: Any) -> None:
        """Sets the logits of what the grammar forbids to -inf. candidates: llama_token_data_array *."""
        if self._grammar is not None and not self.is_waiting:
            self._llama.llama_sampler_apply(self._pointer(self._grammar), candidates)

    def accept(self, token: int) -> None:
        """The answer goes on with `token`. Raises OutputMismatch; the answer must end then."""
        self._shim.accept(self._grammar, self._reasoning, self._is_lazy, token)

    def close(self) -> None:
        """Frees the samplers. Idempotent."""
        for sampler in (self._grammar, self._reasoning):
            if sampler is not None:
                self._llama.llama_sampler_free(self._pointer(sampler))
        self._grammar = self._reasoning = None

    def _pointer(self, sampler: Any) -> Any:
        """The address that cffi holds, as ctypes takes it."""
        return ctypes.cast(int(self._shim.ffi.cast("uintptr_t", sampler)), self._llama.llama_sampler_p_ctypes)

"""What the formats are given: an answer as it comes, and as it was in the end."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvmem_llama.engine.answer_parser import MessageDelta, ParsedMessage
from kvmem_llama.engine.token_probs import TokenProbs

from ..schema import Generation
from ..sse import Event

_LETTERS: Final = string.digits + string.ascii_letters


def random_id(prefix: str = "") -> str:
    """An id as llama-server makes them: 32 letters and digits."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(32))


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of a response have in common."""

    generation: Generation
    model: str  # its name for clients
    fingerprint: str  # of the program
    id: str = field(default_factory=lambda: random_id("chatcmpl-"))
    parses: bool = False  # the answers are read as messages

    def now(self) -> int:
        """Seconds since 1970."""
        return int(time.time())


@dataclass(slots=True)
class AnswerState:
    """What a stream remembers of one answer between its parts."""

    index: int  # of the answer
    n_prompt: int = 0  # tokens
    n_cached: int = 0  # of these, not evaluated
    has_thinking: bool = False
    has_text: bool = False
    created: bool = False
    response_id: str = field(default_factory=lambda: random_id("resp_"))
    reasoning_id: str = field(default_factory=lambda: random_id("rs_"))
    message_id: str = field(default_factory=lambda: random_id("msg_"))
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer that is under way."""

    text: str = ""
    token: int = -1
    n_decoded: int = 0  # tokens sampled so far
    probs: TokenProbs | None = None
    delta: MessageDelta | None = None  # what it adds to the message; only where the head says `parses`
    is_first: bool = False  # before anything the first token has added
    progress: dict[str, Any] | None = None  # of reading the prompt
    timings: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer that is complete."""

    index: int
    content: str
    tokens: tuple[int, ...]
    n_prompt: int  # tokens
    n_cached: int  # of these, not evaluated
    n_decoded: int  # sampled, the end token and those of a stop string included
    stop_type: str
    stopping_word: str
    has_new_line: bool
    truncated: bool
    id_slot: int
    timings: dict[str, Any]
    message: ParsedMessage
    probs: Sequence[TokenProbs]
    prompt: Callable[[], str]
    settings: Callable[[], dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)  # ours, of memory

    @property
    def n_in_cells(self) -> int:
        """Tokens of prompt and answer that were evaluated: the last one sampled was not."""
        return self.n_prompt + max(self.n_decoded - 1, 0)

    @property
    def has_ended(self) -> bool:
        return self.stop_type in ("eos", "word")

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's."""
        return {
            "completion_tokens": self.n_decoded,
            "prompt_tokens": self.n_prompt,
            "total_tokens": self.n_decoded + self.n_prompt,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
        }


class Format(Protocol):
    """One API. Stateless: what a stream remembers is in AnswerState."""

    ends_with_done: bool

    def partial(self, head: Head, state: AnswerState, piece: Piece) -> list[Event]:
        """The events that tell of a part of an answer."""
        ...

    def last(self, head: Head, state: AnswerState, final: Ended) -> list[Event]:
        """The events at the end of a streamed answer."""
        ...

    def whole(self, head: Head, finals: Sequence[Ended]) -> Any:
        """The JSON of answers that were not streamed, in order."""
        ...

    def error(self, body: Mapping[str, Any]) -> Event:
        """The event that tells of an error in mid-stream. body: with the key `error`."""
        ...


def oai_error(body: Mapping[str, Any]) -> Event:
    return Event(dict(body))

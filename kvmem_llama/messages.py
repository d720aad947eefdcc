"""A whole list of messages as tokens, with the ids that a workspace has stored for what it has already.

A sampled answer need not be made of the tokens that the tokenizer makes of its text. So what is stored is
not tokenized again: the text up to the first difference, and every piece between two control tokens (a
message, in most templates) whose bytes are equal, gets the ids that are stored for it.
"""

from __future__ import annotations

import reprlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .engine.chat_template import AnyMessage, Message, Turn, as_json
from .engine.templates import TemplateOptions
from .engine.token_bytes import TokenBytes
from .engine.turn_tokens import TurnTokens, mark_tokens, tokenize_turn
from .engine.vocab import Vocab
from .errors import InputError, InvalidOption
from .native.layout import I32

_AROUND: Final = 64  # bytes; the text of a control token is shorter
_HINT: Final = 'Give a list of {"role": ..., "content": ...} that ends with what the model is to answer.'


def messages_of(
    messages: Sequence[AnyMessage], options: TemplateOptions | None = None
) -> list[dict[str, Any]]:
    """The messages as objects of OpenAI's API. A content is a text, a list of {"type": "text", "text": ...},
    or None for none; what else they hold is for the chat template to judge.

    Raises InputError for anything else, and for a list that ends with an answer, unless the options say what
    is to become of it.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise InputError("the messages", f"a {type(messages).__name__} is no list of them", hint=_HINT)
    found = [_message(i, message) for i, message in enumerate(messages)]
    if not found:
        raise InputError("the messages", "there are none", hint=_HINT)
    options = options or TemplateOptions()
    is_open = options.continue_final_message or options.add_generation_prompt is not None
    if found[-1]["role"] == "assistant" and not is_open:
        raise InputError("the messages", "the last one is the assistant's", hint=_HINT)
    return found


def check_question(question: object, context: object) -> None:
    """Raises InputError for a question that is no text, InvalidOption for texts that are not (name, text)."""
    if not isinstance(question, str):
        raise InputError("the question", f"it is a {type(question).__name__}", hint="Give a text.")
    if not isinstance(context, Sequence) or not all(_is_pair(pair) for pair in context):
        hint = 'For example [("name", "text")].'
        raise InvalidOption("context", reprlib.repr(context), "must be pairs of texts", hint=hint)


def tokenize_messages(vocab: Vocab, turn: Turn, stored: I32) -> TurnTokens:
    """Tokens of a rendered list of messages, BOS once as the vocabulary says, special tokens parsed.

    stored: [n] token ids of the history, whose ids are used where the bytes are equal.
    """
    held = _Stored.of(vocab, stored, turn.text)
    n_kept = held.n_kept(vocab)
    rest = held.data[held.end_of(n_kept) :].decode("utf-8")
    fresh = tokenize_turn(vocab, rest, (), add_bos=not n_kept).tokens
    if n_kept < len(held.ids):
        fresh = held.replaced(vocab, fresh)
    front = np.concatenate([held.front, held.ids[:n_kept]]) if n_kept else held.ids[:0]
    marked = mark_tokens(vocab, turn.text, turn.spans, np.concatenate([front, fresh]))
    if marked is None:  # a tokenizer that normalizes
        marked = tokenize_turn(vocab, turn.text, turn.spans, add_bos=True)
    return marked


def user_marks(vocab: Vocab, turn: Turn, tokens: I32) -> NDArray[np.bool_] | None:
    """[n] which tokens of rendered messages are a user's rather than a tool's; None: all text is."""
    if all(role == "user" for role in turn.roles):
        return None
    of_users = [span for span, role in zip(turn.spans, turn.roles, strict=True) if role == "user"]
    marked = mark_tokens(vocab, turn.text, of_users, tokens)
    return None if marked is None else marked.scored


def question_start(turn: Turn, tokens: TurnTokens, n_query: int) -> int:
    """Index of the first token that may belong to the query: of the newest message or, where the answer goes
    on with a text that is there, of the message that it answers, if that is not more than `n_query` tokens
    away. It is the index of a token, never n."""
    n = len(tokens.tokens)
    if turn.applied.is_continuation and len(tokens.starts) == len(turn.roles):
        asked = [
            start
            for start, role in zip(tokens.starts, turn.roles, strict=True)
            if role != "assistant" and n - start <= n_query
        ]
        if asked:
            return min(asked[-1], n - 1)
    return min(tokens.question, n - 1)


def _is_pair(pair: object) -> bool:
    return isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(it, str) for it in pair)


def _message(i: int, message: AnyMessage) -> dict[str, Any]:
    if not isinstance(message, (Message, Mapping)):
        raise InputError(f"messages[{i}]", f"it is a {type(message).__name__}, not a message", hint=_HINT)
    if isinstance(message, Message) and not isinstance(message.content, str):
        raise InputError(f"messages[{i}]", "its content must be a text", hint=_HINT)
    found = as_json(message)
    content = found.get("content")
    if isinstance(content, list):
        is_text = all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content)
    else:
        is_text = content is None or isinstance(content, str)
    if not isinstance(found.get("role"), str) or not found["role"] or not is_text:
        raise InputError(f"messages[{i}]", "it needs a role, and a content that is text", hint=_HINT)
    if content is None and not found.get("tool_calls"):
        found["content"] = ""
    return found


@dataclass(frozen=True, slots=True)
class _Stored:
    """The ids of a history, without BOS, against a text that is wanted."""

    front: I32  # BOS, where both begin with it and the text does not say so
    ids: I32
    ends: NDArray[np.int64]  # bytes up to the end of each token
    text: bytes
    data: bytes  # of the wanted text
    is_control: NDArray[np.bool_]

    @classmethod
    def of(cls, vocab: Vocab, ids: I32, wanted: str) -> _Stored:
        data = wanted.encode("utf-8", errors="replace")
        front = ids[:0]
        if vocab.add_bos and not data.startswith(vocab.piece(vocab.bos)):
            has_bos = len(ids) > 0 and int(ids[0]) == vocab.bos
            front, ids = (ids[:1], ids[1:]) if has_bos else (front, ids[:0])
        held = TokenBytes(vocab, ids)
        return cls(front, ids, np.cumsum(held.sizes), held.data(), data, held.which(vocab.is_control))

    def end_of(self, n: int) -> int:
        """Bytes of the first `n` tokens."""
        return int(self.ends[n - 1]) if n else 0

    def n_kept(self, vocab: Vocab) -> int:
        """How many tokens the wanted text begins with: all, or those up to a control token. What follows can
        be tokenized by itself."""
        n = _n_common(self.text, self.data)
        if n == len(self.text) and not self._is_inside(vocab, n):
            return len(self.ids)
        inside = np.flatnonzero(self.is_control & (self.ends <= n))
        return int(inside[-1]) + 1 if len(inside) else 0

    def _is_inside(self, vocab: Vocab, n: int) -> bool:
        """The wanted text cannot be cut at byte `n`: in a character, or in the text of a control token."""
        if n < len(self.data) and self.data[n] & 0xC0 == 0x80:
            return True
        at = max(n - _AROUND, 0)
        for token in vocab.tokenize(self.data[at : n + _AROUND]).tolist():
            end = at + len(vocab.piece(token))
            if at < n < end and vocab.is_control(token):
                return True
            at = end
        return False

    def replaced(self, vocab: Vocab, tokens: I32) -> I32:
        """`tokens` with the stored ids in every piece between control tokens that is stored."""
        places: dict[bytes, list[tuple[int, int]]] = {}
        for first, last in _pieces(self.is_control):
            key = self.text[self.end_of(first) : self.end_of(last)]
            places.setdefault(key, []).append((first, last))
        control = np.array([vocab.is_control(token) for token in tokens.tolist()], np.bool_)
        out, at, seen = [], 0, 0
        for first, last in _pieces(control):
            found = places.get(vocab.detokenize(tokens[first:last]))
            if found is None:
                continue
            i = bisect_left(found, (seen, 0))
            place = found[min(i, len(found) - 1)]  # the next one, or the last
            out += [tokens[at:first], self.ids[slice(*place)]]
            at, seen = last, place[1]
        return np.concatenate([*out, tokens[at:]]) if out else tokens


def _pieces(is_control: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs [start, end) of tokens between control tokens."""
    edges = [-1, *np.flatnonzero(is_control).tolist(), len(is_control)]
    return [(before + 1, after) for before, after in pairwise(edges) if after > before + 1]


def _n_common(a: bytes, b: bytes) -> int:
    """How many bytes are equal at the beginning."""
    n = min(len(a), len(b))
    one, other = np.frombuffer(a, np.uint8, n), np.frombuffer(b, np.uint8, n)
    differs = np.flatnonzero(one != other)
    return int(differs[0]) if len(differs) else n

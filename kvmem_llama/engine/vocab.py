"""Tokens and text of one model. Any thread: the vocabulary does not change once loaded."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from ..errors import EngineClosed
from ..native.library import import_binding
from .requests import I32

T = TypeVar("T")

_INT32_MIN = -(2**31)


class Vocab:
    """The vocabulary of a loaded model; valid until the model is closed."""

    def __init__(self, pointer: int) -> None:
        """pointer: address of the llama_vocab."""
        self._llama: Any = import_binding()
        self._pointer: int | None = pointer
        llama = self._llama
        self.n_tokens: int = llama.llama_vocab_n_tokens(pointer)
        self.bos: int = llama.llama_vocab_bos(pointer)  # -1: none
        self.eos: int = llama.llama_vocab_eos(pointer)
        self.eot: int = llama.llama_vocab_eot(pointer)
        self.add_bos: bool = bool(llama.llama_vocab_get_add_bos(pointer)) and self.bos >= 0
        self._lock = threading.Lock()  # of the pointer and of how many are using it
        self._left = threading.Condition(self._lock)
        self._n_users = 0
        # What is asked of a token once is asked for each token of an answer.
        self._pieces: dict[int, bytes] = {}
        self._is_eog: dict[int, bool] = {}
        self._is_control: dict[int, bool] = {}
        n = ctypes.c_int32()
        never = llama.llama_vocab_get_suppress_tokens(pointer, ctypes.byref(n))
        self.suppressed = tuple(int(never[i]) for i in range(n.value))
        """Tokens that, by the model's file, are never to be chosen."""
        self._eogs: tuple[int, ...] | None = None

    @property
    def pointer(self) -> int:
        """Address of the llama_vocab, for the thread that closes the model; others call `using`. Raises
        EngineClosed after `close`."""
        if self._pointer is None:
            raise EngineClosed("the model is closed", hint="Load it again.")
        return self._pointer

    def using(self, function: Callable[[int], T]) -> T:
        """What `function` returns for the address of the llama_vocab, which is not freed meanwhile. Raises
        EngineClosed after `close`."""
        is_counted = False
        try:  # in one frame: an interrupt anywhere in it leaves no user behind, for whom `close` would wait
            with self._lock:
                pointer = self.pointer
                self._n_users += 1
                is_counted = True
            return function(pointer)
        finally:
            if is_counted:
                with self._lock:
                    self._n_users -= 1
                    if not self._n_users:
                        self._left.notify_all()

    def close(self) -> None:
        """The model is about to be freed: later calls raise EngineClosed; waits for those that run."""
        with self._lock:
            self._pointer = None
            while self._n_users:
                self._left.wait(1)  # whoever is interrupted in the midst of leaving tells nobody
            for known in (self._pieces, self._is_eog, self._is_control):
                known.clear()

    def tokenize(self, text: str | bytes, *, add_bos: bool = False, parse_special: bool = True) -> I32:
        """Token ids of `text`, [n] int32.

        add_bos: put BOS first, if the vocabulary says so and the text does not begin with it already.
        parse_special: "<|im_end|>" and the like become their tokens; else they are read as plain text.
        """
        data = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
        tokens = self.using(lambda pointer: self._tokenize(pointer, data, parse_special))
        if add_bos and self.add_bos and not (len(tokens) and int(tokens[0]) == self.bos):
            tokens = np.concatenate([np.array([self.bos], dtype=np.int32), tokens])
        return tokens

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """Bytes of one token, maybe part of a UTF-8 character. special=False: b"" for control tokens."""
        if not 0 <= token < self.n_tokens:
            raise ValueError(f"token {token} outside the vocabulary of {self.n_tokens}")
        if not special and self.is_control(token):
            return b""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self.using(lambda pointer: self._piece(pointer, token))
        return piece

    def detokenize(self, tokens: I32 | list[int], *, special: bool = True) -> bytes:
        """Bytes of a run of tokens: their pieces one after the other."""
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        return b"".join(self.piece(token, special=special) for token in ids)

    def is_eog(self, token: int) -> bool:
        """The model ends its generation with this token (EOS, EOT and the like)."""
        known = self._is_eog.get(token)
        return self.using(lambda pointer: self._ask_is_eog(pointer, token)) if known is None else known

    @property
    def eogs(self) -> tuple[int, ...]:
        """All tokens that end a generation, ascending."""
        if self._eogs is None:
            is_eog = self._llama.llama_vocab_is_eog
            self._eogs = self.using(
                lambda pointer: tuple(token for token in range(self.n_tokens) if is_eog(pointer, token))
            )
        return self._eogs

    def is_control(self, token: int) -> bool:
        """A token that stands for structure, not for text."""
        known = self._is_control.get(token)
        return self.using(lambda pointer: self._ask_is_control(pointer, token)) if known is None else known

    # -- within `using`, so that `close` forgets what is noted here

    def _tokenize(self, pointer: int, data: bytes, parse_special: bool) -> I32:
        room = len(data) + 8  # a token is at least one byte, but for a prefix the tokenizer may add
        while True:
            out = np.empty(room, dtype=np.int32)
            address = out.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            n = self._llama.llama_tokenize(pointer, data, len(data), address, room, False, parse_special)
            if n >= 0:
                return out[:n].copy()
            if n == _INT32_MIN:
                raise OverflowError(f"a text of {len(data)} bytes has more tokens than llama.cpp can count")
            room = -n

    def _piece(self, pointer: int, token: int) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = self._llama.llama_token_to_piece(pointer, token, buffer, room, 0, True)
            if n >= 0:
                break
            room = -n
        piece = self._pieces[token] = buffer.raw[:n]
        return piece

    def _ask_is_eog(self, pointer: int, token: int) -> bool:
        found = self._is_eog[token] = bool(self._llama.llama_vocab_is_eog(pointer, token))
        return found

    def _ask_is_control(self, pointer: int, token: int) -> bool:
        found = self._is_control[token] = bool(self._llama.llama_vocab_is_control(pointer, token))
        return found


def single_tokens(vocab: Vocab, texts: Iterable[str]) -> frozenset[int]:
    """Of the texts that are one token each: these tokens."""
    found = [vocab.tokenize(text) for text in texts]
    return frozenset(int(ids[0]) for ids in found if len(ids) == 1)

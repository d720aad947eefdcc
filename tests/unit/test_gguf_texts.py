"""Where the strings of a GGUF array begin, against a walk through them."""

from __future__ import annotations

import struct

from hypothesis import example, given
from hypothesis import strategies as st

from kvmem_llama.gguf_texts import starts_of

texts = st.lists(
    st.one_of(st.binary(max_size=12), st.sampled_from([b"", b"\0" * 9, b"a" * 255, b"b" * 256, b"\0" * 300])),
    max_size=40,
)


def walked(data: bytes, n: int) -> list[int]:
    starts: list[int] = []
    at = 0
    while len(starts) < n and at + 8 <= len(data):
        starts.append(at)
        at += 8 + struct.unpack_from("<Q", data, at)[0]
    return starts


@given(texts, st.binary(max_size=20), st.integers(0, 50), st.integers(0, 400))
@example([b"ab", b"cd"], b"", 2, 0)
@example([], b"", 3, 0)
@example([b"x"], b"\xff" * 8, 5, 0)  # a length far beyond the data
def test_starts_are_those_of_a_walk(texts: list[bytes], after: bytes, n: int, cut: int) -> None:
    data = b"".join(struct.pack("<Q", len(text)) + text for text in texts) + after
    data = data[: len(data) - cut] if cut < len(data) else b""
    assert starts_of(data, n).tolist() == walked(data, n)

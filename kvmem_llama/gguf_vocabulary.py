"""Whether llama.cpp can load the vocabulary of a GGUF file: what it asserts instead of refusing.

An assertion that fails ends the process (src/llama-vocab.cpp: every token must have a text of its own).
Arrays of scores or types that are too short, and merges that are missing, it refuses by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .errors import ModelCorrupt
from .gguf_header import PER_VALUE, GgufHeader, open_model_file
from .gguf_texts import starts_of

TOKENS: Final = "tokenizer.ggml.tokens"
MAX_VOCABULARY: Final = 256 << 20  # bytes, with what Python adds to each token


def check_vocabulary(path: Path, header: GgufHeader) -> None:
    """Raises ModelCorrupt if two tokens of the model at `path` have the same text.

    Reads all tokens: 0.1 s for a vocabulary of 262,144.
    """
    place = header.arrays.get(TOKENS)
    if place is None:
        return
    if not place.of_strings:
        raise ModelCorrupt(path, f"metadata key {TOKENS!r} is no array of strings")
    n_bytes = place.end - place.start
    if n_bytes + place.length * PER_VALUE > MAX_VOCABULARY:
        raise ModelCorrupt(path, f"its vocabulary of {place.length} tokens takes {n_bytes} bytes")
    try:
        with open_model_file(path) as file:
            file.seek(place.start)
            data = file.read(n_bytes)
    except OSError as error:
        raise ModelCorrupt(path, f"reading failed: {error.strerror or error}") from None
    starts = starts_of(data, place.length).tolist()
    if len(starts) != place.length:
        raise ModelCorrupt(path, "the file became shorter while it was read")
    texts = [data[a + 8 : b] for a, b in zip(starts, [*starts[1:], n_bytes], strict=True)]
    distinct = set(texts)
    if len(distinct) == len(texts) and b"" not in distinct and b"\0" not in b"".join(texts):
        return
    seen: dict[bytes, int] = {}
    for number, whole in enumerate(texts):
        text = whole.partition(b"\0")[0]  # llama.cpp reads it as a C string
        first = seen.setdefault(text or b"[EMPTY_%d]" % number, number)
        if first != number:
            shown = text.decode("utf-8", errors="replace")
            raise ModelCorrupt(path, f"tokens {first} and {number} of its vocabulary are both {shown!r:.80}")

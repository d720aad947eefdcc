"""The declarations that Python uses are those of the C header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvmem_llama.native.cdef import ABI_VERSION, CDEF

HEADER = Path(__file__).parents[2] / "patches" / "llama-kvmem.h"


def normalized(text: str) -> list[str]:
    """Declarations without comments, layout and export macros."""
    text = re.sub(r"//.*", "", text).replace("LLAMA_API", "")
    return [" ".join(part.split()) for part in text.split(";") if part.strip()]


def test_cdef_equals_the_header():
    if not HEADER.is_file():
        pytest.skip("the source tree is not here")
    header = HEADER.read_text(encoding="utf-8")
    start, end = header.index("struct llama_kvmem;"), header.index("#ifdef __cplusplus\n}")
    assert normalized("struct llama_context; " + header[start:end]) == normalized(CDEF)
    assert f"#define KVMEM_ABI_VERSION {ABI_VERSION}\n" in header

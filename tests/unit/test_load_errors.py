"""llama.cpp gives no reason when it fails, it only logs; these are lines it logs (src/llama*.cpp, ggml)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvmem_llama.engine import llama_log
from kvmem_llama.engine.context import _context_error, cells_needed, view_size
from kvmem_llama.engine.model import OutOfMemory, _load_error
from kvmem_llama.errors import EngineError, InvalidOption, ModelCorrupt, ModelUnsupported
from kvmem_llama.settings import Settings

INFO = cast(Any, SimpleNamespace(path=Path("m.gguf"), arch="llama", file_size=5 << 20))


def log(level: int, *texts: str) -> None:
    llama_log.forget()
    for text in texts:
        llama_log._message(level, text.encode(), None)


def test_an_unknown_architecture_is_named() -> None:
    log(4, "llama_model_load: error loading model: unknown model architecture: 'frobnicate'\n")
    error = _load_error(INFO)
    assert isinstance(error, ModelUnsupported) and error.arch == "frobnicate"


@pytest.mark.parametrize(
    "line",
    ["alloc_tensor_range: failed to allocate CPU buffer of size 99\n", "unable to allocate CUDA0 buffer\n"],
)
def test_lack_of_memory_is_told_from_damage(line: str) -> None:
    log(4, line)
    assert isinstance(_load_error(INFO), OutOfMemory)
    assert isinstance(_context_error(Settings(), 512), OutOfMemory)


def test_anything_else_about_weights_is_damage_in_llama_cpps_words() -> None:
    log(4, "llama_model_load: missing tensor 'blk.3.attn_q.weight'\n")
    error = _load_error(INFO)
    assert isinstance(error, ModelCorrupt) and "missing tensor 'blk.3.attn_q.weight'" in str(error)


def test_anything_else_about_a_context_names_the_option_or_the_words() -> None:
    log(4, "llama_init_from_model: V cache quantization requires flash_attn\n")
    assert isinstance(_context_error(Settings(cache_type_v="q4_0"), 512), InvalidOption)
    log(4, "llama_init_from_model: some new reason\n")
    error = _context_error(Settings(), 512)
    assert type(error) is EngineError and "some new reason" in str(error)


def test_lines_come_in_pieces_and_only_warnings_and_errors_are_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log(2, "loading model\n")
    assert llama_log.last_lines() == []
    llama_log._message(4, b"failed to ", None)
    llama_log._message(5, b"load \xff\n", None)
    assert llama_log.last_lines() == ["failed to load \ufffd"]
    assert capsys.readouterr().err == ""
    llama_log.show(True)
    try:
        log(2, "seen\n")
    finally:
        llama_log.show(False)
    assert capsys.readouterr().err == "seen\n"


def test_lines_for_debugging_llama_cpp_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    llama_log.show(True)
    try:
        log(1, "input tensor 'kvmem_rows' ")
        llama_log._message(5, b"is used by node\n", None)
        log(2, "layers: ")
        llama_log._message(5, b"30\n", None)
    finally:
        llama_log.show(False)
    assert capsys.readouterr().err == "layers: 30\n"


def test_cells_are_views_with_slack_rounded_up() -> None:
    model = cast(Any, SimpleNamespace(n_ctx_train=8192))
    assert view_size(Settings(), model) == 8192
    assert view_size(Settings(n_ctx=512), model) == 512
    assert view_size(Settings(n_ctx=10**6), model) == 8192
    assert cells_needed(Settings(), 512) == 768  # 573 up to a multiple of 256
    assert cells_needed(Settings(n_parallel=4), 512) == 2304
    assert cells_needed(Settings(slack=0.0), 512) == 512

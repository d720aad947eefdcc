"""Makes the plain llama.cpp loop importable for the tests in this folder, and what several of them share."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import pytest

from kvmem_llama.memory import invariants
from kvmem_llama.memory.session import Session

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every finished step checks the books of its session."""
    monkeypatch.setattr(Session, "after_step", staticmethod(invariants.check))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, quantized."""
    from tiny_models import write_model

    path = tmp_path_factory.mktemp("tiny") / "llama.gguf"
    return write_model(path, "llama", quantization=gguf.GGMLQuantizationType.Q4_1)

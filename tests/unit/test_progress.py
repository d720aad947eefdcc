"""The line that a terminal shows while a step works."""

from __future__ import annotations

import time

import pytest

from kvmem_llama.cli import progress
from kvmem_llama.cli.progress import ReadingBar
from kvmem_llama.memory.report import Progress


def given(bar: ReadingBar) -> bool:
    """Whether the sign of life comes."""
    deadline = time.monotonic() + 20
    while bar._sign is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return bar._sign is not None


def test_a_sign_of_life_comes_while_nothing_can_be_counted_and_goes_for_what_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    bar = ReadingBar()
    bar.wait()
    assert given(bar)
    bar.show(Progress("read", 128, 1000))
    assert bar._sign is None and bar._timer is None
    bar.show(Progress("query", 20, 20))  # it is evaluated; the first token is not there
    assert given(bar)
    bar.close()
    assert bar._sign is None and bar._timer is None


def test_no_sign_comes_after_the_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    bar = ReadingBar()
    bar.wait()
    bar.close()
    time.sleep(0.15)
    assert bar._sign is None

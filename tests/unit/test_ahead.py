"""What is done while a model is loaded, and what is made once whoever asks."""

from __future__ import annotations

import sys
import threading

import pytest

from kvmem_llama import ahead
from kvmem_llama.native.once import Once


def test_wanted_modules_are_there_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_wanted", ["no_such_module", "errors:no_such_function"])
    ahead.want("occurrence", "errors:exit_code", "occurrence")
    assert ahead._wanted[2:] == ["occurrence", "errors:exit_code"]
    monkeypatch.delitem(sys.modules, "kvmem_llama.occurrence", raising=False)
    interval = sys.getswitchinterval()
    with ahead.importing():
        assert sys.getswitchinterval() < interval
    assert "kvmem_llama.occurrence" in sys.modules and sys.getswitchinterval() == pytest.approx(interval)


def test_of_several_at_once_the_last_brings_back_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_wanted", [])
    interval = sys.getswitchinterval()
    first, second = ahead.importing(), ahead.importing()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < interval
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_an_error_meanwhile_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_wanted", [])
    interval = sys.getswitchinterval()
    with pytest.raises(RuntimeError, match="no model"), ahead.importing():
        raise RuntimeError("no model")
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_it_is_made_once_whoever_comes_first() -> None:
    made: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def make() -> object:
        begun.set()
        go_on.wait()
        made.append(1)
        return object()

    once = Once(make)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(once())) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    go_on.set()
    for thread in threads:
        thread.join()
    assert made == [1] and len(set(map(id, found))) == 1
    once.cache_clear()
    assert once() is not found[0]


def test_what_failed_is_tried_again() -> None:
    answers = [ValueError("not yet"), 7]

    def make() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    once = Once(make)
    with pytest.raises(ValueError, match="not yet"):
        once()
    assert once() == once() == 7

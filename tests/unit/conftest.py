"""The `kvmem` command with a fake engine behind it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import Script

from kvmem_llama.cli.main import main


class Done:
    """What a run left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.events = [json.loads(line) for line in out.splitlines()] if out.startswith("{") else []


class Pipe(io.TextIOWrapper):
    """Standard input that is not a terminal."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setitem(sys.modules, "kvmem_llama.workspace", script.module())
    sampler = SimpleNamespace(SamplingParams=SimpleNamespace(of=lambda settings, n_view: (settings, n_view)))
    monkeypatch.setitem(sys.modules, "kvmem_llama.engine.sampler", sampler)
    monkeypatch.setattr(
        "kvmem_llama.models.resolve", lambda spec, cache, notify=None: Path(spec or "built-in")
    )
    return script


@pytest.fixture
def run_kvmem(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Done]:
    def run(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", Pipe(stdin))
        code = main(arguments)
        caught = capsys.readouterr()
        return Done(code, caught.out, caught.err)

    return run

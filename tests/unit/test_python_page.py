"""Every block of code in docs/python.md runs, and a caller's types are checked."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_model

import kvmem_llama

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "python.md"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_blocks_of_the_page_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a small model with random weights, whose answers are noise."""
    model = write_model(tmp_path / "model.gguf", "llama")
    (tmp_path / "notes.md").write_text("The quick brown fox jumps over the lazy dog.\n" * 60)
    monkeypatch.chdir(tmp_path)
    resolve: Callable[..., Path] = lambda spec, cache, notify=None: model  # noqa: E731
    monkeypatch.setattr("kvmem_llama.models.resolve", resolve)
    page = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    blocks = list(FENCE.finditer(page))
    assert len(blocks) >= 10
    for block in blocks:
        line = page.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
    out = capsys.readouterr().out
    assert "blocks recalled" in out and "none of them is read again" in out and "query: " in out


GOOD = """
from pathlib import Path

from kvmem_llama import Answer, Engine, Finished, RecallParams, SamplingParams, Step, StepResult, TextPiece
from kvmem_llama import aio


def talk(engine: Engine) -> str:
    with engine.workspace("notes", system="Be brief.") as ws:
        step: Step = ws.add(Path("notes.md"), source="notes")
        result: StepResult = step.result()
        answer: Answer = ws.chat("why?", sampling=SamplingParams(temp=0.5), recall=RecallParams(refresh=64))
        for event in answer:
            if isinstance(event, TextPiece):
                print(event.text)
            elif isinstance(event, Finished):
                result = event.result
        (report,) = answer.recall
        ws.pin(report.blocks[0])
        ws.pin(0, 64)
        ws.chat([{"role": "user", "content": "why?"}]).result(1.5)
        seconds: float = answer.timings.prefill + result.timings["read_s"]
        n: int = answer.usage.recalled
        return answer.text + str(seconds + n) + ws.search("why?", 3).blocks[0].text


async def talk_later(engine: aio.Engine) -> str:
    async with await engine.workspace() as ws:
        answer: aio.Answer = await ws.chat("why?", max_tokens=3)
        async for event in answer:
            print(event)
        await ws.pin(range(8))
        n: int = (await answer.usage).generated
        return await answer.text + str(n)


with Engine("model.gguf", n_ctx=1024, temp=0.0) as engine:
    print(talk(engine))
"""
BAD = {
    'Engine(n_ctx=["1024"])': "arg-type",
    'SamplingParams(temp="hot")': "arg-type",
    "SamplingParams(heat=1.0)": "call-arg",
    'RecallParams(query_long="middle")': "arg-type",
    "ws.add(3.5)": "arg-type",
    "ws.chat(None)": "arg-type",
    "ws.chat('why?').txt": "attr-defined",
    "ws.add('x').text": "attr-defined",
    "ws.pin('all')": "call-overload",
    "ws.chat('why?').usage.prompt = 3": "misc",
    "aio.Engine().workspace().chat('x')": "attr-defined",
}


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_the_types_of_a_callers_program_are_checked(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    lines = ["from kvmem_llama import Engine, RecallParams, SamplingParams, Workspace, aio", "ws: Workspace"]
    (tmp_path / "bad.py").write_text("\n".join([*lines, *BAD]) + "\n")
    # As an installed package: what is wrong inside of it is not the caller's business.
    options = [
        "--strict",
        "--follow-imports=silent",
        "--no-error-summary",
        "--config-file=",
        "--cache-dir=cache",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    home = Path(kvmem_llama.__file__).parents[1]
    is_installed = home.name == "site-packages"  # mypy finds it there by itself
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "good.py", "bad.py"],
        cwd=tmp_path,
        env=environment if is_installed else {**environment, "MYPYPATH": str(home)},
        capture_output=True,
        text=True,
    )
    found: dict[int, set[str]] = {}
    error = re.compile(r"^([^:\n]+):(\d+): error: .*\[([\w-]+)\]$", re.MULTILINE)
    for file, line, kind in error.findall(done.stdout):
        assert file == "bad.py", done.stdout + done.stderr
        found.setdefault(int(line), set()).add(kind)
    expected = {i + len(lines) + 1: kind for i, kind in enumerate(BAD.values())}
    assert found.keys() == expected.keys(), done.stdout + done.stderr
    for line, kind in expected.items():
        assert kind in found[line], (line, kind, found[line])

"""llama.cpp's own chat in a terminal, `llama-cli --server-base`, as a client of this server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from servers import Server, our_server, stock_server

TALK = "Say hello in five words.\nAnd in three?\n/exit\n"
SPEED = re.compile(r"\[ Prompt: .*\]")


def talk(program: Path, server: Server) -> str:
    """What is on the screen after the first question, without speeds."""
    done = subprocess.run(
        [program, "--server-base", server.url, "-n", "16", "--temp", "0", "--simple-io"],
        input=TALK, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "smol" in done.stdout  # the model by the name that the server tells
    return SPEED.sub("", done.stdout[done.stdout.index("> ") :])


def test_llama_cli_talks_to_it_as_to_the_stock_server(
    stock_program: Path, smollm2: Path, tmp_path: Path
) -> None:
    program = stock_program.with_name("llama-cli")
    if not program.is_file():
        pytest.skip(f"{program} is missing: scripts/build_stock server builds it")
    with our_server(smollm2, tmp_path) as ours:
        here = talk(program, ours)
    with stock_server(stock_program, smollm2, tmp_path) as stock:
        there = talk(program, stock)
    assert here.count(">") >= 2 and len(here) > 40
    assert here == there

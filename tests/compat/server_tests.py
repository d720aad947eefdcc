"""Runs llama.cpp's own tests of its server (tools/server/tests) against a program, with a model on disk.

server_tests.json says what is in scope: a file or a test that is not has its reason there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from servers import free_port

HERE: Final = Path(__file__).resolve().parent
_SECONDS: Final = 3600  # for the tests of one call


@dataclass(frozen=True, slots=True)
class Scope:
    """files: names in `unit/` without `test_` and `.py`. reasons: pattern of a test's name, why it is out.
    subset: tests that run with every suite."""

    files: tuple[str, ...]
    files_left_out: dict[str, str]
    reasons: tuple[tuple[str, str], ...]
    subset: tuple[str, ...]

    @classmethod
    def read(cls) -> Scope:
        found = json.loads((HERE / "server_tests.json").read_text(encoding="utf-8"))
        reasons = [(pattern, row["why"]) for row in found["left_out"] for pattern in row["tests"]]
        return cls(tuple(found["files"]), found["files_left_out"], tuple(reasons), tuple(found["subset"]))

    def why_not(self, test: str) -> str | None:
        """Why a test is out of scope; None if it is in. test: pytest's name of it."""
        name = test.removeprefix("unit/test_")
        return next((why for pattern, why in self.reasons if re.fullmatch(pattern, name)), None)

    def unused(self, tests: Iterable[str]) -> list[str]:
        """Patterns that none of the tests has."""
        names = [test.removeprefix("unit/test_") for test in tests]
        return [p for p, _ in self.reasons if not any(re.fullmatch(p, name) for name in names)]


def our_program(folder: Path) -> Path:
    """A launcher of `kvmem serve` in `folder`: every server has an empty folder of its own for workspaces,
    and is by default as open to pages of other origins as llama-server is."""
    path = folder / "kvmem-server"
    data = shlex.quote(str(folder / "data-XXXXXX"))
    path.write_text(
        f'#!/bin/sh\nexport KVMEM_DATA_DIR="$(mktemp -d {data})"\n'
        "export LLAMA_ARG_CORS_ORIGINS='*' LLAMA_ARG_CORS_CREDENTIALS=1\n"
        f'exec {shlex.quote(sys.executable)} -m kvmem_llama.cli.main serve "$@"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def run_server_tests(
    tests: Path, program: Path, model: Path, folder: Path, names: Sequence[str]
) -> dict[str, str]:
    """Each test of `names` (files or tests, as `unit/test_x.py::test_y`) -> "passed", "failed" or "skipped".

    tests: the folder tools/server/tests. folder: for the log, server_tests.log.
    Raises RuntimeError if pytest cannot run them, subprocess.TimeoutExpired if they hang.
    """
    results, log = folder / "results.json", folder / "server_tests.log"
    results.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_ARG_", "KVMEM_"))}
    env |= {
        "LLAMA_SERVER_BIN_PATH": str(program),
        "KVMEM_SERVER_TESTS_MODEL": str(model),
        "KVMEM_SERVER_TESTS_RESULTS": str(results),
        "PORT": str(free_port()),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "local_models", "-p", "no:cacheprovider"]
    command += ["-m", "not slow", *names]
    with log.open("ab") as out:
        done = subprocess.run(
            command,
            cwd=tests,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
        )
    if done.returncode > 1 or not results.exists():
        raise RuntimeError(f"pytest failed:\n{log.read_text(errors='replace')[-4000:]}")
    found: dict[str, str] = json.loads(results.read_text(encoding="utf-8"))
    return found

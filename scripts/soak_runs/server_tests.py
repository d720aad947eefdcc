"""llama.cpp's own tests of its server, run against the stock server and against ours.

The stock server, with the same model, says which tests are to pass: every test in scope that it passes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .common import ROOT, TREE, fast_folder, say

sys.path.insert(0, str(ROOT / "tests" / "compat"))

from server_tests import Scope, our_program, run_server_tests
from tiny_smol import write_tiny_smol

_STOCK = ROOT / "build" / "stock_server" / "bin" / "llama-server"


def run(model: Path, stock: Path | None = None, tree: Path | None = None) -> None:
    """model: SmolLM2. stock: a stock llama-server. tree: llama.cpp's sources."""
    stock = stock or _STOCK
    tests = (tree or TREE) / "tools" / "server" / "tests"
    if not stock.is_file() or not tests.is_dir():
        sys.exit(f"{stock} or {tests} is missing: give --stock and --tree, or run scripts/build_stock server")
    scope, seen = Scope.read(), list[str]()
    n_passed, failed, unexplained = 0, list[str](), list[str]()
    with fast_folder() as folder:
        tiny, ours = write_tiny_smol(model, folder / "tiny.gguf"), our_program(folder)
        for file in scope.files:
            name = [f"unit/test_{file}.py"]
            control = run_server_tests(tests, stock, tiny, folder, name)
            left_out = [test for test in control if scope.why_not(test)]
            in_scope = {test: how for test, how in control.items() if test not in left_out}
            wanted = [test for test, how in in_scope.items() if how == "passed"]
            found = run_server_tests(tests, ours, tiny, folder, wanted) if wanted else {}
            passed = [test for test in wanted if found.get(test) == "passed"]
            say(
                f"{file}: {len(control)} tests, {len(left_out)} left out, {len(passed)} of {len(wanted)} pass"
            )
            seen += control
            n_passed += len(passed)
            failed += [test for test in wanted if test not in passed]
            unexplained += [test for test in in_scope if test not in wanted]
        if failed:
            say((folder / "server_tests.log").read_text(errors="replace")[-8000:])
    n_wanted = n_passed + len(failed)
    say(f"{len(seen)} tests; {n_passed} pass of {n_wanted} that the stock server passes in scope")
    assert not failed, f"the stock server passes these, ours does not: {failed}"
    assert not unexplained, f"the stock server fails, and server_tests.json does not say why: {unexplained}"
    assert not scope.unused(seen), f"server_tests.json names tests that are none: {scope.unused(seen)}"

"""kvmem_llama.Llama against llama_cpp.Llama on the stock library: one script, one import changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("llama_script.py")
STOCK_IMPORT, OUR_IMPORT = "from llama_cpp import Llama\n", "from kvmem_llama import Llama\n"
ARGUMENTS = (
    "n_ctx=512", "n_batch=128", "n_ubatch=128", "n_threads=2", "n_threads_batch=2", "flash_attn=1",
    "type_k=8", "type_v=8",
)  # fmt: skip
OF_THE_RUN = ("id", "created")  # differ between any two runs


@pytest.fixture(scope="module")
def results(smollm2, stock_lib, tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the script finds with either class."""
    folder = tmp_path_factory.mktemp("llama_class")
    text = SCRIPT.read_text()
    assert text.count(STOCK_IMPORT) == 1
    (folder / "stock.py").write_text(text)
    (folder / "ours.py").write_text(text.replace(STOCK_IMPORT, OUR_IMPORT))
    found = []
    for name, more in (("stock", {"LLAMA_CPP_LIB_PATH": str(stock_lib)}), ("ours", {})):
        out = folder / f"{name}.json"
        call = [sys.executable, str(folder / f"{name}.py"), str(smollm2), str(out), *ARGUMENTS]
        subprocess.run(call, check=True, env=dict(os.environ, **more), timeout=300)
        found.append(json.loads(out.read_text()))
    return found[0], found[1]


def cases() -> list[str]:
    names = SCRIPT.read_text().split("CASES = [")[1].split("]")[0]
    return [name for name in names.replace("\n", " ").replace(" ", "").split(",") if name]


def test_every_attribute_of_the_stock_class_is_there_or_refused(results):
    stock, ours = results
    assert set(stock["names"]) <= set(ours["names"])


@pytest.mark.parametrize("case", [case for case in cases() if case != "names"])
def test_results_equal_the_stock_class_but_for_ids_and_times(results, case):
    stock, ours = results
    assert without_run(ours[case]) == without_run(stock[case])


def without_run(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: ("cmpl" if key == "id" and str(item).startswith("c") else without_run(item))
            for key, item in value.items()
            if key not in OF_THE_RUN or (key == "id" and not str(item).startswith(("cmpl", "chatcmpl")))
        }
    return [without_run(item) for item in value] if isinstance(value, list) else value

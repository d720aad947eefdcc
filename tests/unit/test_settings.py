"""The table of options: sources, limits, and the documentation made from it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.errors import InvalidOption
from kvmem_llama.settings import BY_NAME, OPTIONS, Settings

REPO = Path(__file__).resolve().parents[2]


def test_defaults_are_valid_and_llama_cpps() -> None:
    settings = Settings.from_sources({}, {})
    assert (settings.n_ctx, settings.temp, settings.top_k, settings.top_p) == (0, 0.8, 40, 0.95)
    assert settings.n_sink == settings.block_size == 32
    assert settings.n_ubatch == 128


def test_flags_names_and_variables_are_unique() -> None:
    flags = [flag for option in OPTIONS for flag in option.flags]
    assert len(flags) == len(set(flags))
    assert len({option.env for option in OPTIONS}) == len(OPTIONS)
    assert all(option.help and option.flags for option in OPTIONS)


def test_the_command_line_wins_over_the_environment_over_the_default() -> None:
    env = {"KVMEM_N_CTX": "512", "KVMEM_TEMP": "0.1", "KVMEM_SEED": ""}
    settings = Settings.from_sources({"n_ctx": "1024", "temp": None}, env)
    assert (settings.n_ctx, settings.temp, settings.seed) == (1024, 0.1, -1)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("on", True), ("Yes", True), ("0", False), ("off", False)]
)
def test_switches_are_read_from_the_environment(text: str, value: bool) -> None:
    assert Settings.from_sources({}, {"KVMEM_EXACT": text}).exact is value


def test_words_of_llama_cpp_stand_for_numbers() -> None:
    assert Settings.from_sources({"n_gpu_layers": "all", "n_threads": "-1"}, {}).n_gpu_layers == -2
    assert Settings.from_sources({"n_threads": "-1"}, {}).n_threads == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_ctx", -1), ("n_ctx", 2**31), ("n_ubatch", -1), ("block_size", 0), ("n_sink", 33), ("n_sink", -2),
        ("n_recent", -2), ("n_reserve", -5), ("n_query", 0), ("n_parallel", 0), ("temp", float("nan")),
        ("temp", float("inf")), ("top_p", 1.5), ("min_p", -0.1), ("seed", 2**32), ("cache_type_k", "f15"),
        ("policy", "lru"), ("position_mode", ""), ("slack", 2.0), ("max_moves", -1), ("compact_ratio", 0.5),
        ("layers_scored", "3,x"), ("layers_scored", ""), ("n_predict", -2), ("n_ctx", 1.5), ("n_ctx", True),
        ("exact", 1), ("n_ctx", "many"), ("temp", "hot"), ("exact", "maybe"), ("n_ctx", "9" * 5000),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_its_flag_and_what_is_allowed(name: str, value: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        Settings.from_sources({name: value}, {})
    assert caught.value.name in BY_NAME[name].flags
    assert caught.value.why


def test_a_bad_variable_is_named() -> None:
    for value in ("-1", "many"):
        with pytest.raises(InvalidOption, match="KVMEM_N_CTX"):
            Settings.from_sources({}, {"KVMEM_N_CTX": value})


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(InvalidOption, match="no such option"):
        Settings.from_sources({"n_ctxx": 1}, {})


def test_copies_are_checked_too() -> None:
    with pytest.raises(InvalidOption):
        dataclasses.replace(Settings(), n_ubatch=-1)
    assert Settings(block_size=16).n_sink == 16
    assert Settings(block_size=16, n_sink=0).n_sink == 0


def test_scored_layers_are_a_sorted_set() -> None:
    assert Settings().scored_layers() is None
    assert Settings(layers_scored="7, 3,7").scored_layers() == (3, 7)


def test_the_cache_folder_follows_the_xdg_variable_and_the_option_wins() -> None:
    assert Settings.from_sources({}, {"XDG_CACHE_HOME": "/x"}).cache_path == Path("/x/kvmem")
    env = {"XDG_CACHE_HOME": "/x", "KVMEM_CACHE_DIR": "/y"}
    assert Settings.from_sources({}, env).cache_path == Path("/y")
    assert Settings().cache_path == Path.home() / ".cache" / "kvmem"


def test_the_data_folder_follows_the_xdg_variable_and_the_option_wins() -> None:
    assert Settings.from_sources({}, {"XDG_DATA_HOME": "/x"}).data_path == Path("/x/kvmem/workspaces")
    env = {"XDG_DATA_HOME": "/x", "KVMEM_DATA_DIR": "/y"}
    assert Settings.from_sources({}, env).data_path == Path("/y")
    assert Settings().data_path == Path.home() / ".local" / "share" / "kvmem" / "workspaces"


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("4096", 4096), ("256M", 2**28), ("256MiB", 2**28), ("2gb", 2**31), ("1.5K", 1536)],
)
def test_sizes_are_written_with_their_unit(text: str, value: int) -> None:
    assert Settings.from_sources({"host_budget": text}, {}).host_budget == value


@pytest.mark.parametrize("text", ["", "M", "1X", "-1", "1 M M", "1e3", "infG", "1MM", "nanK"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        Settings.from_sources({"disk_budget": text}, {})


@given(name=st.sampled_from([option.name for option in OPTIONS]), text=st.text(max_size=20))
def test_any_text_is_either_a_value_or_an_invalid_option(name: str, text: str) -> None:
    try:
        settings = Settings.from_sources({name: text}, {})
    except InvalidOption:
        return
    assert type(getattr(settings, name)) is BY_NAME[name].type or BY_NAME[name].type is float


def test_only_settings_reads_the_environment() -> None:
    for path in sorted((REPO / "kvmem_llama").rglob("*.py")):
        if path.name != "settings.py":
            assert not re.search(r"\bos\.(environ|getenv)\b|\bgetenv\(", path.read_text()), path


def test_the_page_of_options_is_current() -> None:
    command = [sys.executable, str(REPO / "scripts" / "options_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

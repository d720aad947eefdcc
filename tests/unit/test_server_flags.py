"""The command line of `kvmem serve`: llama-server's flags and names, and no crash over unknown ones."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvmem_llama.errors import InputError, InvalidOption, ModelNotFound
from kvmem_llama.server.flags import LLAMA_ENV, N_PARALLEL, SERVER_OPTIONS, Parsed, help_text, parse
from kvmem_llama.server.ignored_flags import IGNORED
from kvmem_llama.server.running import run
from kvmem_llama.settings import BY_NAME, OPTIONS

LLAMA_SERVER = """-m x.gguf -c 4096 -n 64 -b 2048 -ub 512 -ngl 99 -t 4 -tb 4 -np 2 -ctk q8_0 -ctv q8_0 -fa on
    --host 127.0.0.1 --port 9000 --alias b,a,b --api-key k --slot-save-path /s/ --metrics --no-slots --jinja
    --chat-template chatml --temp 0.5 --top-k 3 --seed 7 --timeout 60 --cors-origins localhost --no-ui --props
    --log-disable --cont-batching --context-shift --no-warmup --offline --log-file l --log-verbosity 3
    --log-timestamps --log-prefix --reasoning-format none --reasoning-budget 5"""


def parsed(line: str, env: dict[str, str] | None = None) -> Parsed:
    return parse(line.split(), env or {})


def test_a_command_line_of_llama_server_is_understood() -> None:
    found = parsed(LLAMA_SERVER)
    settings, options = found.settings, found.options
    assert (settings.model, settings.n_predict, settings.n_ubatch, settings.n_gpu_layers) == (
        "x.gguf",
        64,
        512,
        99,
    )
    assert (settings.temp, settings.top_k, settings.seed, settings.cache_type_v) == (0.5, 3, 7, "q8_0")
    assert (options.port, options.aliases, options.api_keys()) == (9000, ("a", "b"), ("k",))
    assert (options.metrics, options.slots, options.ui, options.props) == (True, False, False, True)
    assert (options.reasoning_format, options.reasoning_budget, options.log_file) == ("none", 5, "l")
    assert found.warnings == ()


def test_the_context_is_shared_by_the_slots_that_were_asked_for() -> None:
    assert parsed("-c 4096 -np 4").settings.n_ctx == 1024
    assert parsed("-c 4096 -np 4 --kv-unified").settings.n_ctx == 4096
    assert parsed("-c 4096 -np 4 -kvu").settings.n_ctx == 4096
    assert parsed("-c 4096", {"LLAMA_ARG_N_PARALLEL": "2"}).settings.n_ctx == 2048
    alone = parsed("-c 4096").settings
    assert (alone.n_ctx, alone.n_parallel) == (4096, N_PARALLEL)
    assert parsed("-c 4096 -np -1").settings == alone
    assert parsed("-np 2").settings.n_ctx == 0  # the trained window


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("--metricss", "unknown option '--metricss' is ignored; did you mean --metrics?"),
        ("--frobnicate 3", "unknown option '--frobnicate 3' is ignored"),
        ("--frobnicate=3", "unknown option '--frobnicate=3' is ignored"),
        ("--frobnicate -1", "unknown option '--frobnicate -1' is ignored"),
        ("stray", "'stray' is ignored: it belongs to no option"),
        ("--cache-ram 100", "--cache-ram changes nothing here: prompts are kept in workspaces"),
        ("--embeddings", "--embeddings changes nothing here: embeddings are not supported, and requests"),
    ],
)
def test_what_is_not_known_is_a_warning(line: str, warning: str) -> None:
    found = parsed(line + " --port 7000")
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith(warning)
    assert found.options.port == 7000


def test_a_missing_model_is_told_before_an_address_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmem_llama.server.running.bind", lambda *_: pytest.fail("an address was taken"))
    found = parsed(f"-m {tmp_path / 'none.gguf'}")
    state = SimpleNamespace(settings=found.settings, options=found.options)
    with pytest.raises(ModelNotFound, match=r"none\.gguf"):
        run(cast(Any, state))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--port x", "--port"),
        ("--port 99999", "--port"),
        ("--port", "--port"),
        ("-fa off", "-fa"),
        ("-ctk q3_x", "-ctk"),
        ("--api-prefix x", "--api-prefix"),
        ("--reasoning maybe", "-rea"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(line: str, named: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(named)):
        parsed(line)


def test_the_environment_has_llama_servers_names() -> None:
    env = {
        "LLAMA_ARG_CTX_SIZE": "512", "LLAMA_ARG_PORT": "7001", "LLAMA_API_KEY": "a,b", "LLAMA_ARG_UI": "0",
        "LLAMA_ARG_ENDPOINT_METRICS": "1", "LLAMA_ARG_TOP_K": "9",
    }  # fmt: skip
    found = parsed("--top-k 3", env)
    assert (found.settings.n_ctx, found.options.port, found.settings.top_k) == (512, 7001, 3)
    assert (found.options.api_keys(), found.options.ui, found.options.metrics) == (("a", "b"), False, True)
    assert parsed("", env | {"KVMEM_TOP_K": "5"}).settings.top_k == 5
    with pytest.raises(InvalidOption, match="LLAMA_ARG_PORT"):
        parsed("", {"LLAMA_ARG_PORT": "high"})


def test_switches_may_be_given_a_value_and_may_be_switched_off() -> None:
    assert parsed("--metrics=0").options.metrics is False
    assert parsed("--no-slots=1").options.slots is False
    assert parsed("--no_webui").options.ui is False
    assert parsed("--no-jinja").settings.jinja is False


def test_a_model_of_the_hub_may_be_named_as_llama_server_has_it() -> None:
    assert parsed("-hf owner/name:Q4_K_M").settings.model == "owner/name:Q4_K_M"
    assert parsed("", {"LLAMA_ARG_HF_REPO": "owner/name"}).settings.model == "owner/name"
    assert parsed("", {"LLAMA_ARG_HF_REPO": "owner/name", "LLAMA_ARG_MODEL": "x"}).settings.model == "x"
    for line in ("-mu https://x/y.gguf", "--docker-repo=x", "-hff x.gguf", "--gpt-oss-20b-default"):
        with pytest.raises(InvalidOption, match="-m owner/name"):
            parsed(line)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--mlock", "--gpu-layers"),
        ("-ts 1,2", "--gpu-layers"),
        ("--prio 2", "the system places the threads"),
        ("--spec-draft-n-max 4", "no speculative decoding"),
        ("--gpu-layers-draft 4", "no speculative decoding"),
        ("--grammar x", "a request has its own `grammar`"),
        ("-sys x", "in the messages of a request"),
    ],
)
def test_what_changes_nothing_is_told_with_its_reason(line: str, why: str) -> None:
    (warning,) = parsed(line).warnings
    assert "changes nothing here" in warning and why in warning


def test_keys_come_from_flags_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\none\n\ntwo\n")
    assert parsed(f"--api-key a --api-key b,a --api-key-file {file}").options.api_keys() == (
        "a",
        "b",
        "one",
        "two",
    )
    with pytest.raises(InputError, match="--api-key-file"):
        parsed("--api-key-file /nowhere/keys").options.api_keys()


def test_no_flag_means_two_things() -> None:
    of = [{flag for option in OPTIONS for flag in option.flags}, {f for o in SERVER_OPTIONS for f in o.flags}]
    assert not of[0] & of[1]
    assert not (of[0] | of[1]) & set(IGNORED)
    assert not {option.name for option in OPTIONS} & {option.name for option in SERVER_OPTIONS}
    assert set(LLAMA_ENV) <= set(BY_NAME) | {option.name for option in SERVER_OPTIONS}


def test_help_has_every_flag_and_our_own_come_last() -> None:
    page = help_text()
    for option in SERVER_OPTIONS:
        assert option.flags[-1] in page
    assert page.index("Server (llama-server's names)") < page.index("Server (kvmem_llama's own)")
    assert page.index("Server (kvmem_llama's own)") < page.index("\nMemory:")
    assert "--layers-scored" not in page

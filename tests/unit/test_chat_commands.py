"""Every command of the chat against a fake engine: what it does, what it says, what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Script, recall_report

from kvmem_llama import errors
from kvmem_llama.chat.memory_commands import _fact
from kvmem_llama.chat.table import COMMANDS

Run = Callable[..., Any]


@pytest.fixture
def chat(run_kvmem: Run) -> Run:
    """Types lines into a chat without a terminal -> what it left behind."""

    def run(*lines: str, options: tuple[str, ...] = ()) -> Any:
        return run_kvmem("chat", *options, stdin="".join(f"{line}\n" for line in lines).encode())

    return run


def asked(script: Script) -> list[str]:
    return [question for question, *_ in script.asked]


# -- the chat


def test_every_command_is_explained_by_help(chat: Run) -> None:
    lines = chat("/help").err.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  /")]
    assert names == [f"/{command.name}" for command in COMMANDS]
    assert chat("/help rm").err.count("\n") == 1


def test_an_unknown_command_is_an_error_and_is_never_sent(chat: Run, script: Script) -> None:
    done = chat("/frobnicate now", "/help nonsense", "/")
    assert done.code == 2 and script.asked == []
    assert done.err.count("error: ") == 3 and "/frobnicate" in done.err


def test_a_message_that_is_no_command_may_begin_with_a_slash_after_a_quote_or_a_space(
    chat: Run, script: Script
) -> None:
    chat('"""/etc/passwd', 'is what?"""', " /etc")
    assert asked(script) == ["/etc/passwd\nis what?", "/etc"]


def test_exit_ends_the_chat(chat: Run, script: Script) -> None:
    assert chat("/exit", "one").code == 0 and script.asked == []


def test_a_message_in_quotes_has_several_lines_and_may_lack_its_end(chat: Run, script: Script) -> None:
    chat('"""', "one", "", "/two", '"""', '"""three', "four")
    assert asked(script) == ["one\n\n/two", "three\nfour"]


# -- turns


def test_regen_asks_the_last_question_again_with_another_seed(chat: Run, script: Script) -> None:
    done = chat("one", "two", "/regen", "/regen", options=("--seed", "5"))
    assert asked(script) == ["one", "two", "two", "two"] and done.code == 0
    assert [sampling[0].seed for _, _, sampling, _ in script.asked] == [5, 5, 6, 7]
    again = chat("one", "/regen", "/export talk.md")
    assert again.out == "The key is under the mat.\n" * 2
    assert "1 question with" in again.err


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_undo_takes_turns_back(chat: Run, tmp_path: Path) -> None:
    done = chat("one", "two", "three", "/undo 2", "/export left.jsonl", "/undo", "/undo", "/undo 0")
    assert [m["content"] for m in messages(tmp_path / "left.jsonl")] == ["one", "The key is under the mat."]
    assert "[taken back: two, and 1 after it]" in done.err and "there is none yet" in done.err
    assert chat("one", "/undo 2").code == 2


def messages(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_documents_of_a_turn_that_is_taken_back_are_read_again(
    chat: Run, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("N")
    done = chat("one", "/undo", "two", "/regen", options=("-f", "notes"))
    assert [documents for _, documents, *_ in script.asked] == [[("notes", "N")]] + [[("", "notes:\nN")]] * 2
    assert "the texts that came with it are read again with the next message" in done.err


def test_edit_replaces_the_last_message(chat: Run, script: Script, tmp_path: Path) -> None:
    done = chat("one", "/edit two", "/export left.jsonl", "/edit")
    assert asked(script) == ["one", "two"]
    assert [m["content"] for m in messages(tmp_path / "left.jsonl")] == ["two", "The key is under the mat."]
    assert "/edit TEXT" in done.err  # nobody can edit in a pipe


def test_texts_that_were_read_later_are_not_lost_unasked(chat: Run, script: Script, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("one two three")
    done = chat("one", "/read notes", "/undo", "/regen", "/edit x", "/clear")
    assert asked(script) == ["one"]
    assert done.err.count("3 tokens that were read since then") == 4 == done.err.count("nothing was changed")


def test_clear_keeps_what_was_read_before_the_conversation(chat: Run, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("one two three")
    done = chat("/clear", "/read notes", "one", "two", "/clear", "/workspaces")
    assert "there is no conversation yet" in done.err and "3 tokens that were read before it stay" in done.err
    assert re.search(r"\* unnamed +3 tokens", done.err)


def test_the_system_prompt_is_set_while_nothing_was_said(chat: Run, script: Script) -> None:
    done = chat("/system", "/system Be brief.", "/system", "one", "/system Be long.", "/new", "/system")
    assert done.err.splitlines() == [
        "[there is no system prompt]",
        "[the system prompt is set]",
        "Be brief.",
        "[this workspace keeps the system prompt it was made with; /new begins one with the new prompt]",
        "[workspace unnamed-3, which ends with the chat: empty]",
        "Be long.",
    ]
    assert script.system == "Be long."


# -- what is shown, what leaves the chat


def test_reasoning_is_left_out_of_a_pipe_unless_it_is_wanted(chat: Run, script: Script) -> None:
    script.answer = "<think>\nhm, well </think>\n\nYes."
    done = chat("one", "/think", "two", "/think off", "three", "/think maybe")
    assert done.out == "Yes.\nhm, well \nYes.\nYes.\n"
    assert "reasoning is shown" in done.err and "it is on or off" in done.err
    assert script.thinking == [True, True, False]


def test_copy_needs_a_terminal(chat: Run, script: Script) -> None:
    assert "there is none yet" in chat("/copy").err
    done = chat("one", "/copy", "/copy 2")
    assert "this terminal has none" in done.err and "0 blocks of code" in done.err


def test_export_writes_markdown_and_jsonl(chat: Run, tmp_path: Path) -> None:
    done = chat("où?", "/export a.md", "/export a.jsonl", "/export a.txt", "/export", options=("-sys", "S"))
    assert (tmp_path / "a.md").read_text(encoding="utf-8") == (
        "# unnamed\n\n## System\n\nS\n\n## User\n\noù?\n\n## Assistant\n\nThe key is under the mat.\n"
    )
    assert messages(tmp_path / "a.jsonl") == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "où?"},
        {"role": "assistant", "content": "The key is under the mat."},
    ]
    assert ".md or .jsonl" in done.err and "a file is needed" in done.err


def test_export_says_what_it_leaves_out(chat: Run, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("four words of text")
    done = chat("one", "/export a.md", "/read long.txt", "/export b.md")
    assert "1 question with answers]" in done.err
    assert "4 tokens that were read apart from questions (/read) are left out]" in done.err
    assert "four words" not in (tmp_path / "b.md").read_text()


def test_sizes_of_an_index_are_rounded() -> None:
    shown = _fact("index_bytes_per_token", {"heads": 144.0, "lexical": 6.0731})
    assert shown.split("  ")[-1].strip() == "heads 144, lexical 6.1"


def test_export_replaces_no_file_unasked_and_reports_what_fails(chat: Run, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("mine")
    done = chat(
        "one", "/export a.md", "/export none/b.md", f"/export {'x' * 9000}.md", "/export ~nobody/x.md"
    )
    assert (tmp_path / "a.md").read_text() == "mine" and done.code == 7
    assert "Replace a.md? Nobody can be asked: no." in done.err and "none/b.md" in done.err


# -- workspaces


def test_workspaces_without_a_name_stay_until_the_end(chat: Run, script: Script) -> None:
    done = chat("one", "/new", "two", "three", "/workspaces", "/switch unnamed", "/workspaces", "/switch x")
    assert re.search(r"\* unnamed-2 +14 tokens  this one, in RAM\n  unnamed +7 tokens  in RAM", done.err)
    assert re.search(r"\* unnamed +7 tokens  this one, in RAM\n  unnamed-2 +14 tokens  in RAM", done.err)
    assert "there is no workspace named 'x'" in done.err
    assert script.n_closed == 3  # two workspaces and the engine


def test_a_fork_has_the_history_and_is_a_workspace_of_its_own(chat: Run, tmp_path: Path) -> None:
    done = chat("one", "/fork", "two", "/export fork.jsonl", "/switch unnamed", "/export it.jsonl", "/fork x")
    assert [m["content"] for m in messages(tmp_path / "fork.jsonl")][::2] == ["one", "two"]
    assert [m["content"] for m in messages(tmp_path / "it.jsonl")][::2] == ["one"]
    assert "Use /fork without a name" in done.err


def test_the_current_workspace_is_not_deleted_and_others_not_unasked(chat: Run, script: Script) -> None:
    done = chat("/rm", "/rm unnamed", "/new", "/rm unnamed", "/workspaces")
    assert "a name is needed" in done.err and "you are in it" in done.err
    assert "nothing was deleted" in done.err and "  unnamed " in done.err


def test_there_is_nothing_to_verify_in_ram(chat: Run) -> None:
    assert "nothing of it is stored" in chat("/verify").err


# -- memory


def test_read_takes_files_patterns_and_names_with_spaces(chat: Run, script: Script, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "with space.txt", "sub/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "empty").write_text("")
    done = chat(
        "/read a.txt", "/read with space.txt", '/read "with space.txt" **/*.txt', "/read empty", "/read"
    )
    assert [source for source, _ in script.read] == [
        "a.txt", "with space.txt", "with space.txt", "a.txt", "b.txt", "c.txt", "with space.txt",
    ]  # fmt: skip
    assert done.err.startswith("[read a.txt: 256 tokens]") and "there is no text in it" in done.err
    assert "a file is needed" in done.err


@pytest.mark.parametrize("name", ["missing.txt", "*.none", "a\0b", ".", "~nobody/x", "x" * 9000])
def test_read_names_what_cannot_be_read(chat: Run, script: Script, name: str) -> None:
    done = chat(f"/read {name}")
    assert done.code == 7 and "cannot read" in done.err and script.read == []


def test_paste_reads_the_lines_that_follow(chat: Run, script: Script) -> None:
    chat("/paste", "one", "", "/two", "/end", "/paste log", "three")
    assert script.read == [("pasted text", "one\n\n/two"), ("log", "three")]
    assert "nothing was pasted" in chat("/paste", "/end").err


def test_forget_asks_first(chat: Run) -> None:
    done = chat("/forget", "one", "/forget", "/workspaces")
    assert "nothing to forget" in done.err and "nothing was forgotten" in done.err
    assert re.search(r"unnamed +7 tokens", done.err)


def test_recall_shows_the_last_recall_or_what_a_query_finds(chat: Run, script: Script) -> None:
    script.reports = [recall_report()]
    done = chat("/recall", "one", "/recall", "/recall where is the key")
    assert "there is no answer yet" in done.err
    assert "1 of 28 blocks selected" in done.err and "320..351" in done.err
    assert script.searched == [("where is the key", 10)] and "128..159" in done.err
    script.reports = []
    assert "nothing had to be recalled" in chat("one", "/recall").err


def test_why_shows_what_the_last_answer_attended_to(chat: Run, script: Script) -> None:
    script.reports = [recall_report()]
    done = chat("/why", "one", "/why")
    assert "something was read since" in done.err
    assert done.err.splitlines()[-3:] == [
        "75% of the attention went to the blocks of the view, the rest to the answer's newest tokens",
        "   50.0%         320..351  selected  the key is under",
        "   25.0%            0..31  sink      You are",
    ]


def test_show_recall_lists_the_blocks_of_every_answer(chat: Run, script: Script) -> None:
    script.reports = [recall_report()]
    done = chat("one", "/set recall off", "two", "/set recall on", "three", options=("--show-recall",))
    assert done.err.count("1 of 28 blocks selected") == 2


def test_pins_are_set_listed_and_taken_back(chat: Run) -> None:
    done = chat(
        "/pin", "one", "/pin 0..3", "/pin 2-4", "/pin", "/unpin 0..3", "/pin", "/unpin 0..3", "/pin 5..99"
    )
    assert done.err.splitlines()[:7] == [
        "[nothing is pinned]", "[pinned: tokens 0..3]", "[pinned: tokens 2..4]", "  0..3", "  2..4",
        "[no longer pinned: tokens 0..3]", "  2..4",
    ]  # fmt: skip
    assert "no such pin" in done.err and "the history holds 7 tokens" in done.err
    assert "320..351" in chat("/pin here").err


def test_stats_tell_of_memory_and_the_last_answer(chat: Run) -> None:
    done = chat("one", "/stats")
    facts = dict(re.findall(r"^  (\S.*?)  +(.*)$", done.err, re.MULTILINE))
    assert (facts["n tokens"], facts["store bytes"], facts["read s"]) == ("7", "8,388,608 (8.0M)", "0.500")
    assert facts["blocks read ahead"] == "0" and not {"hint", "score", "n orphans"} & set(facts)
    assert not [line for line in done.err.splitlines() if line.endswith(" ")]


# -- options


def test_sampling_can_be_changed_and_the_rest_is_refused(chat: Run, script: Script) -> None:
    done = chat(
        "/set temp 0", "/set --top-k 5", "/set n-ctx 5", "/set x 5", "/set temp hot", "/set markdown 3", "one"
    )
    sampling = script.asked[0][2][0]
    assert (sampling.temp, sampling.top_k) == (0.0, 5)
    assert done.err.splitlines()[:2] == ["temp = 0.0", "top_k = 5"]
    assert "Start kvmem chat with -c" in done.err and done.err.count("error: ") == 4


def test_show_lists_what_can_be_changed_or_tells_one_option(chat: Run) -> None:
    names = [line.split()[0] for line in chat("/show").err.splitlines()]
    assert {"temp", "seed", "n_predict", "markdown", "recall"} <= set(names) and "n_ctx" not in names
    assert chat("/show n_ctx", options=("-c", "256")).err.split()[:2] == ["n_ctx", "256"]


# -- programs


def test_json_tells_everything_in_events(run_kvmem: Run, script: Script) -> None:
    script.reports = [recall_report()]
    lines = b"one\n/recall\n/recall key\n/stats\n/workspaces\n/frob\n/read none\n/new\n"
    done = run_kvmem("chat", "--json", stdin=lines)
    assert done.code == 7 and done.err == ""
    kinds = [event["event"] for event in done.events]
    first = ["progress"] * 3 + ["recall"] + ["text"] * 6 + ["finished"]
    assert kinds == [*first, "recall", "found", "stats", "workspaces", "error", "error", "note"]
    by_kind = dict(zip(kinds, done.events, strict=True))
    assert by_kind["workspaces"]["workspaces"][0]["name"] == "unnamed"
    assert by_kind["found"]["blocks"][0]["start"] == 128 and by_kind["error"]["error"] == "InputError"


def test_json_ends_with_what_broke_the_chat(run_kvmem: Run, script: Script) -> None:
    script.open_error = errors.LibraryMismatch("a stock library")
    done = run_kvmem("chat", "--json", stdin=b"one\n")
    assert done.code == 4 and done.events[-1]["error"] == "LibraryMismatch"


def test_a_grammar_file_reaches_the_sampler(run_kvmem: Run, script: Script, tmp_path: Path) -> None:
    done = run_kvmem("chat", "--grammar-file", str(tmp_path / "none.gbnf"), stdin=b"one\n")
    assert done.code == 7 and "none.gbnf" in done.err


def test_the_page_lists_every_command() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
    rows = [f"| `{f'/{c.name} {c.arguments}'.strip()}` | {c.help} |" for c in COMMANDS]
    assert re.findall(r"^\| `/.*$", page, re.MULTILINE) == [row.replace("|off]", "\\|off]") for row in rows]

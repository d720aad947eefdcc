"""Every command of the chat against a fake engine: what it does, what it says, what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, Script, recall_report
from rich.cells import cell_len

from kvmem_llama import errors
from kvmem_llama.chat.look import Look
from kvmem_llama.chat.seats import Seats
from kvmem_llama.chat.session import Session
from kvmem_llama.chat.stats_lines import stats_lines
from kvmem_llama.chat.table import COMMANDS
from kvmem_llama.chat.workspace_commands import opening_lines
from kvmem_llama.cli.inputs import Document
from kvmem_llama.memory.positions import TokenPos
from kvmem_llama.policies.policy import MemoryStats
from kvmem_llama.settings import Settings
from kvmem_llama.store.tiered import TierStats

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
    assert done.err.count("error: ") == 3
    assert "error: unknown command /frobnicate: /help lists them\n" in done.err
    assert "error: unknown command /recal: did you mean /recall?\n" in chat("/recal").err


def test_no_hint_names_the_help_of_the_command_line(chat: Run) -> None:
    wrong = ("/pin abc", "/pin 5..99", "/set n_predict abc", "/set temp", "/set", "/set x 1", "/set n -9")
    done = chat("one", *wrong, "/undo x", "/copy 9", "/think maybe", "/switch", "/unpin 1..2", "/show y")
    assert done.err.count("error: ") == len(wrong) + 6
    assert "--help" not in done.err and "-n =" not in done.err
    assert "error: /set n_predict abc: must be a whole number\n/show n_predict tells" in done.err
    assert "See /help pin." in done.err and "error: /set temp: a value is needed\nIt is 0.8 now." in done.err


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
    assert "[taken back: two, and 1 after it]" in done.err and "nothing to take back yet" in done.err
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
    assert "error: /edit: there is nothing to edit yet\n" in chat("/edit").err


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
    assert "there is no answer yet" in chat("/copy").err
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
    per_token = {"heads": 144.0, "lexical": 6.0731}
    stats = MemoryStats("kvmem", 9, 512, 9, 0, 9, index_bytes=2048, index_bytes_per_token=per_token)
    assert "2.0K; bytes a token: heads 144, lexical 6.1" in "\n".join(stats_lines(stats, None))


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
    assert "Use /fork without a name" in done.err and "kvmem chat -w NAME" in done.err


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


def test_why_shows_what_the_last_answer_attended_to(
    chat: Run, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "111")
    script.reports = [recall_report()]
    done = chat("/why", "one", "/why")
    assert "error: /why: there is no answer yet\n" in done.err
    assert done.err.splitlines()[-4:] == [
        "75% of the attention went to the blocks of the view, the rest to the answer's newest tokens",
        "  share    tokens  why       text",
        "  50.0%  320..351  selected  the key is under",
        "  25.0%     0..31  sink      You are",
    ]


@pytest.mark.parametrize("columns", [40, 80, 100, 200])
def test_no_row_is_wider_than_the_terminal(
    chat: Run, script: Script, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    report = recall_report()
    wide = replace(report.blocks[1], text="鍵はマットの下" * 40, channels={"mean_k": 12, "lexical": 345})
    script.reports = [replace(report, blocks=(report.blocks[0], wide))]
    commands = ("/help", "/recall", "/recall key", "/why", "/stats", *(("/show",) if columns >= 80 else ()))
    lines = chat("one", *commands).err.splitlines()
    assert max(cell_len(line) for line in lines) < columns
    assert any("鍵は" in line and "…" in line for line in lines)


def test_the_best_blocks_of_a_recall_come_first_and_the_rest_is_counted(chat: Run, script: Script) -> None:
    report = recall_report()
    ranked = [replace(report.blocks[1], start=TokenPos(32 * n), rank=41 - n) for n in range(1, 41)]
    script.reports = [replace(report, blocks=(report.blocks[0], *ranked))]
    rows = chat("one", "/recall").err.splitlines()
    head = next(i for i, row in enumerate(rows) if row.startswith("  rank"))
    assert [row.split()[0] for row in rows[head + 1 : -1]] == [str(n) for n in range(1, 21)]
    assert rows[-1] == "  and 21 more of the view"


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
    assert "error: /pin 5..99: the history holds 7 tokens\n" in done.err
    assert "320..351" in chat("/pin here").err
    backwards = chat("one", "/pin 9..5", "/unpin 6-1").err
    assert "error: /pin 9..5: the last token, 5, comes before the first, 9\nSee /help pin.\n" in backwards
    assert "error: /unpin 6-1: the last token, 1, comes before the first, 6\n" in backwards


def test_stats_tell_of_memory_and_the_last_answer(chat: Run) -> None:
    done = chat("one", "/stats")
    facts = dict(re.findall(r"^  (\S.*?)  +(.*)$", done.err, re.MULTILINE))
    assert facts["tokens"] == "7 in 8 blocks" and facts["tokens in view"] == "7 of at most 512"
    assert (facts["stored, with forks"], facts["reading"]) == ("8 blocks, 8.0M", "0.500 s")
    assert not {"read ahead", "pinned", "answering"} & set(facts)  # nothing to tell
    assert not [line for line in done.err.splitlines() if line.endswith(" ")]


def test_stats_use_no_name_twice_and_none_of_the_programs(chat: Run) -> None:
    tiers = TierStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0.5, 12, True)
    stats = MemoryStats(
        "kvmem", 9, 512, 9, 1, 9, n_orphans=1, n_without_rows=1, n_recomputed=1, tiers=tiers, pins=((0, 2),),
        score="words", hint="Calibrate.",
    )  # fmt: skip
    lines = stats_lines(stats, None)
    names = re.findall(r"^  (\S.*?)  ", "\n".join(lines), re.MULTILINE)
    assert len(names) == len(set(names)) and not [name for name in names if name.startswith(("n ", "is "))]
    assert lines[-1] == "Calibrate."


# -- options


def test_sampling_can_be_changed_and_the_rest_is_refused(chat: Run, script: Script) -> None:
    done = chat(
        "/set temp 0", "/set --top-k 5", "/set n-ctx 5", "/set x 5", "/set temp hot", "/set markdown 3", "one"
    )
    sampling = script.asked[0][2][0]
    assert (sampling.temp, sampling.top_k) == (0.0, 5)
    assert done.err.splitlines()[:2] == ["temp = 0.0", "top_k = 5"]
    assert "Start kvmem chat with -c" in done.err and done.err.count("error: ") == 4
    aliases = chat("/set temperature 0", "/set n 5", "/set --predict 6", "/set temprature 1", "/show typical")
    assert aliases.err.splitlines()[:3] == ["temp = 0.0", "n_predict = 5", "n_predict = 6"]
    assert "Did you mean temp?" in aliases.err and "\n  typical_p  1.0 " in aliases.err


def test_the_columns_of_show_are_aligned(chat: Run) -> None:
    rows = [line for line in chat("/show").err.splitlines() if re.match(r"  \S", line)]
    at = {re.match(r"  \S+ +", row).end() for row in rows}  # type: ignore[union-attr]
    assert len(at) == 1


# -- the greeting


def test_the_greeting_tells_of_texts_that_wait_and_of_a_step_that_was_interrupted() -> None:
    engine = FakeEngine(Script())
    seats = Seats(engine, Settings(), engine.workspace())  # type: ignore[arg-type]
    screen: Any = SimpleNamespace(typed=False, leave=lambda: None)
    session = Session(Settings(), seats, screen, Look(), [Document("a.txt", "A"), Document("b.txt", "B")])
    first, kept, waits = opening_lines(session)
    assert first == "workspace unnamed, which ends with the chat: empty" and "kvmem chat -w NAME" in kept
    assert waits == "Read with the first message: a.txt, b.txt"
    session.pending = []
    seats.now.stats = replace(seats.now.workspace.stats(), n_orphans=3)
    assert "its question or text is not in the history. 3 blocks" in " ".join(opening_lines(session))


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

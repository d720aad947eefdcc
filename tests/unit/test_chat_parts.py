"""The parts of the chat that need no terminal: Markdown, reasoning, pasted texts, completion, files."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from kvmem_llama.chat import typed_before
from kvmem_llama.chat.completing import ChatCompleter
from kvmem_llama.chat.exporting import jsonl, markdown
from kvmem_llama.chat.markdown import MarkdownWriter
from kvmem_llama.chat.pasting import Pasted
from kvmem_llama.chat.screen import collected, is_open, unquoted
from kvmem_llama.chat.toolbar import short, size
from kvmem_llama.conversation import Turn

# -- Markdown


class Page:
    """A small terminal that a writer draws on."""

    def __init__(self, columns: int = 40, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.written = io.StringIO()

    def size(self) -> tuple[int, int]:
        return self.columns, self.rows

    def writer(self, *, render: bool = True) -> MarkdownWriter:
        return MarkdownWriter(self.written, color=lambda: "standard", size=self.size, render=lambda: render)

    def lines(self) -> list[str]:
        """What can be read on it at the end, and above it."""
        screen = pyte.HistoryScreen(self.columns, self.rows, history=1000, ratio=0.5)
        screen.set_mode(pyte.modes.LNM)
        pyte.Stream(screen).feed(self.written.getvalue())
        above = ["".join(line[x].data for x in range(self.columns)) for line in screen.history.top]
        lines = [line.rstrip() for line in [*above, *screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines


TEXT = """\
# A title
Some **bold** text that is longer than one row of this page, and then
some more of it.
- one
- two `code`
```python
def f(x): return x  # a line that is much wider than this page
```
The end."""

DRAWN = [
    "A title",
    "",
    "Some bold text that is longer than one",
    "row of this page, and then some more of",
    "it.",
    "",
    " • one",
    " • two code",
    "",
    "```python",
    "def f(x): return x  # a line that is muc",
    "h wider than this page",
    "```",
    "",
    "The end.",
]


@pytest.mark.parametrize("n", [1, 3, 1000])
def test_markdown_is_drawn_alike_however_it_comes(n: int) -> None:
    page = Page()
    writer = page.writer()
    for i in range(0, len(TEXT), n):
        writer.text(TEXT[i : i + n])
    writer.end()
    assert page.lines() == DRAWN


def test_text_is_on_the_screen_before_its_block_is_complete() -> None:
    page = Page()
    writer = page.writer()
    writer.text("Some **bo")
    assert page.lines() == ["Some **bo"]
    writer.text("ld** text\n\n")
    assert page.lines() == ["Some bold text"]


def test_what_was_drawn_is_never_touched_again() -> None:
    page = Page(rows=6)
    writer = page.writer()
    writer.text("First.\n\n" + "word " * 100 + "\n\nLast.")  # the second block is higher than the page
    writer.end()
    lines = page.lines()
    assert lines[:2] == ["First.", ""] and lines[-2:] == ["", "Last."]
    assert "".join(lines).replace(" ", "").count("word") == 100


def test_a_page_whose_size_changed_is_left_as_it_is() -> None:
    page = Page()
    writer = page.writer()
    writer.text("Some **bold** ")
    page.columns = 30
    writer.text("text\n\nEnd.")
    writer.end()
    assert page.lines() == ["Some **bold** text", "", "End."]


def test_text_that_is_not_rendered_stays_as_it_came() -> None:
    page = Page()
    writer = page.writer(render=False)
    writer.text("# A title\n\nSome **bold** text.")
    writer.end()
    assert page.lines() == ["# A title", "", "Some **bold** text."]


def test_reasoning_stands_dimmed_before_the_answer() -> None:
    page = Page()
    writer = page.writer()
    writer.reasoning("hm, ")
    writer.reasoning("well")
    writer.text("Yes.")
    writer.end()
    assert page.lines() == ["hm, well", "", "Yes."]
    assert "\x1b[2mhm, \x1b[22m" in page.written.getvalue()


@given(st.text(alphabet="ab *_`#-\n|1.>日", max_size=80), st.integers(1, 7))
def test_no_letter_of_a_markdown_text_is_lost(text: str, n: int) -> None:
    page = Page(rows=12)
    writer = page.writer()
    for i in range(0, len(text), n):
        writer.text(text[i : i + n])
    writer.end()
    letters = [c for c in text if c in "ab日"]
    assert [c for line in page.lines() for c in line if c in "ab日"] == letters


# -- what is typed


def test_quotes_hold_a_message_of_several_lines() -> None:
    assert is_open('"""') and is_open('"""one\n') and is_open('  """""') and not is_open('"""one"""')
    assert not is_open('one """') and unquoted('"""\none\n"""') == "one" and unquoted(" one ") == "one"
    rest = iter(["two", 'three"""', "four"])
    assert unquoted(collected('"""one', lambda: next(rest))) == "one\ntwo\nthree"
    assert unquoted(collected('"""one', lambda: None)) == "one"


def test_long_pasted_texts_are_shown_by_a_mark() -> None:
    pasted = Pasted()
    long = "x\r\n" * 5000
    mark = pasted.shown(long)
    assert len(mark) < 60 and pasted.shown("short\rtext") == "short\ntext"
    assert pasted.expanded(f"a {mark} b") == "a " + "x\n" * 5000 + " b"


def completions(completer: ChatCompleter, text: str) -> list[str]:
    document = Document(text)
    return [completion.text for completion in completer.get_completions(document, CompleteEvent())]


def test_commands_and_what_they_take_are_completed(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("")
    completer = ChatCompleter({"workspace": lambda: ["main", "other"], "option": lambda: ["temp", "top_k"]})
    assert completions(completer, "/re") == ["read", "recall", "regen"]
    assert completions(completer, "/switch m") == ["main"] and completions(completer, "/rm ") == [
        "main",
        "other",
    ]
    assert (
        completions(completer, "/set t") == ["temp", "top_k"] and completions(completer, "/set temp 0") == []
    )
    assert completions(completer, f"/read {tmp_path}/no") == ["tes.md"]
    assert completions(completer, "a /re") == completions(completer, "/frob x") == []


def test_the_history_file_is_its_owners_only_and_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    path.parent.mkdir()
    path.write_text("\n# then\n+" + "x" * 200)
    path.chmod(0o644)
    history = typed_before.ChatHistory(path)
    history.append_string("one\ntwo")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert next(iter(typed_before.ChatHistory(path).load_history_strings())) == "one\ntwo"
    path.write_text("".join(f"\n# {i}\n+line {i}\n" for i in range(100_000)))
    newest = list(typed_before.ChatHistory(path).load_history_strings())
    assert newest[0] == "line 99999" and path.stat().st_size < typed_before.MAX_BYTES


def test_without_a_usable_history_file_the_chat_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = typed_before.ChatHistory(tmp_path / "file" / "history")
    history.append_string("one")
    assert history.get_strings() == ["one"]


# -- files, numbers


TURNS = (Turn(0, 5, 9, "", "où?\n", "là"), Turn(9, 12, 14, "notes:\nN\n\n", "and?", "no"))


def test_a_conversation_is_exported_for_people_and_for_programs() -> None:
    assert markdown("t", None, TURNS) == (
        "# t\n\n## User\n\noù?\n\n## Assistant\n\nlà\n\n## User\n\nnotes:\nN\n\nand?\n\n## Assistant\n\nno\n"
    )
    assert jsonl("s", TURNS[1:]) == (
        '{"role": "system", "content": "s"}\n{"role": "user", "content": "notes:\\nN\\n\\nand?"}\n'
        '{"role": "assistant", "content": "no"}\n'
    )


@pytest.mark.parametrize(
    ("n", "shown"),
    [(0, "0"), (999, "999"), (1234, "1.2k"), (41_200, "41k"), (1_000_000, "1.0M"), (2 * 10**7, "20M")],
)
def test_counts_are_short_in_the_bar(n: int, shown: str) -> None:
    assert short(n) == shown


def test_sizes_are_in_the_largest_unit() -> None:
    assert [size(n) for n in (5, 2048, 3 << 20, 1.5 * (1 << 30))] == ["5B", "2.0K", "3.0M", "1.5G"]


def test_alt_enter_and_pasted_line_ends_do_not_send(monkeypatch: pytest.MonkeyPatch) -> None:
    from prompt_toolkit.application import create_app_session

    from kvmem_llama.chat.look import Look
    from kvmem_llama.chat.prompt import PromptScreen

    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        screen = PromptScreen(Look(), InMemoryHistory(), ChatCompleter({}), lambda: "")
        keys.send_text("one\x1b\rtwo\x1b[200~three\rfour\x1b[201~\r")
        assert screen.next_message() == "one\ntwothree\nfour"
        keys.send_text("\x04")
        assert screen.next_message() is None

"""The chat with the native libraries: durable workspaces, what is resumed, Ctrl-C at real work."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import GEMMA, write_model

from kvmem_llama import Settings, open_engine
from kvmem_llama.cli.main import main
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import InputError

READY = "ask something, or /help"
Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama.gguf", "llama")


@pytest.fixture
def chat(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Chat:
    """Types lines into a chat -> exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*lines: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        typed = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
        code = main(["chat", "-m", str(tiny), "-c", "256", "-n", "6", "--temp", "0", *options])
        return (code, *capfd.readouterr())

    return run


def messages(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_named_chat_goes_on_with_all_its_turns(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("There is a lake. " * 40)
    options = ("-w", "main", "-sys", "Be brief.", "-f", "notes.txt")
    assert chat("where?", "and\twhen?  ", "/export before.jsonl", options=options)[0] == 0
    before = messages(tmp_path / "before.jsonl")
    code, out, _ = chat(
        "/export after.jsonl", "/undo", "/regen", "/export left.jsonl", options=("--continue",)
    )
    assert code == 0 and out.count("\n") >= 1
    after, left = messages(tmp_path / "after.jsonl"), messages(tmp_path / "left.jsonl")
    assert after == before and [m["role"] for m in after] == ["system", *["user", "assistant"] * 2]
    assert after[3]["content"] == "and\twhen?" and after[1]["content"].endswith("where?")
    assert [m["content"] for m in left[:2]] == [m["content"] for m in after[:2]]
    assert left[2] == after[2]  # greedy: the same question has the same answer


def test_named_workspaces_are_made_visited_forked_checked_and_deleted(chat: Chat) -> None:
    code, _, err = chat(
        *(
            "/new one",
            "first?",
            "/pin 0..15",
            "/fork two",
            "second?",
            "/verify",
            "/switch one",
            "/workspaces",
        ),
        *("/new one", "/rm one", "/stats", "/recall first"),
    )
    assert code in (2, 5, 7)
    lines = err.splitlines()
    assert "[workspace one: empty]" in lines and any(line.endswith("all as written") for line in lines)
    listed = [line.split()[:2] for line in lines if " tokens" in line and not line.startswith("[")]
    sizes = {name.strip("* "): int(n.replace(",", "")) for name, n in _listing(lines)}
    assert set(sizes) == {"one", "two", "unnamed"} and sizes["two"] > sizes["one"] > sizes["unnamed"] == 0, (
        listed
    )
    assert "a workspace named 'one' exists already" in err and "you are in it" in err
    code, _, err = chat("/workspaces", "/switch two", "/pin")
    assert code == 0 and "  0..15" in err.splitlines()


def _listing(lines: list[str]) -> list[tuple[str, str]]:
    return [found.groups() for line in lines if (found := re.match(r"[* ] (\S+) +([\d,]+) tokens", line))]  # type: ignore[misc]


def test_turns_are_found_in_the_history_of_every_template(tiny: Path, tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain.gguf", "llama", template=GEMMA)
    for model in (tiny, plain):
        with (
            open_engine(model, Settings(n_ctx=256)) as engine,
            engine.workspace(system="Be brief.") as workspace,
        ):
            for question in ("where is it?", "two\n\nlines", "<|im_end|>"):
                workspace.ask(question, sampling=SamplingParams(temp=0), max_tokens=4).result()
            turns = workspace.turns()
            assert [turn.question for turn in turns] == ["where is it?", "two\n\nlines", "<|im_end|>"]
            assert [turn.end for turn in turns[:2]] == [turn.start for turn in turns[1:]]
            assert turns[-1].end == workspace.n_tokens and workspace.system == "Be brief."
            workspace.truncate(turns[1].start)
            assert [turn.question for turn in workspace.turns()] == ["where is it?"]


def test_attention_of_an_answer_is_that_of_plain_softmax_and_leaves_no_trace(tiny: Path) -> None:
    settings = Settings(n_ctx=256, exact=True, raw_k_type="f32")
    sampling = SamplingParams(temp=0)
    answers: list[list[str]] = []
    for looks in (True, False):
        with open_engine(tiny, settings) as engine, engine.workspace() as workspace:
            workspace.read("There is a lake between two hills. " * 30).result()
            said = []
            for question in ("where is the lake?", "and the hills?", "why?"):
                result = workspace.ask(question, sampling=sampling, max_tokens=40).result()
                said.append(result.text)
                if looks:
                    found = workspace.attended()
                    assert found == workspace.attended()
                    masses = [block.mass for block in found]
                    assert masses == sorted(masses, reverse=True) and 0 < sum(masses) <= 1
                    selected = {b.start for b in result.recalls[-1].blocks if b.why == "selected"}
                    assert selected and selected <= {block.start for block in found}
            answers.append(said)
            if looks:
                workspace.read("more").result()
                with pytest.raises(InputError):
                    workspace.attended()
    assert answers[0] == answers[1]


def test_a_grammar_and_a_json_schema_are_followed(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "yes.gbnf").write_text('root ::= "yes" | "no"')
    code, out, _ = chat("is it?", options=("--grammar-file", "yes.gbnf"))
    assert code == 0 and out in ("yes\n", "no\n")
    schema = '{"enum": ["hot", "cold"]}'
    code, out, _ = chat("is it?", options=("-j", schema, "-n", "20"))
    assert code == 0 and out in ('"hot"\n', '"cold"\n')
    assert chat("is it?", options=("-j", schema, "--grammar", "root ::= [a-z]"))[0] == 2
    assert chat("is it?", options=("-j", "{"))[0] == 7


# -- in a terminal, with the built-in model


@pytest.fixture
def talk(smollm2: Path, isolated_home: Path) -> Any:
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    from terminal import Terminal

    terminals: list[Terminal] = []

    def run(*options: str) -> Terminal:
        program = [sys.executable, "-m", "kvmem_llama.cli.main", "chat", "-m", str(smollm2), "-c", "512"]
        terminals.append(Terminal([*program, "--temp", "0", *options]))
        return terminals[-1]

    yield run
    for terminal in terminals:
        terminal.__exit__(None, None, None)


def answering(question: str) -> Callable[[str], bool]:
    """Something of the answer is on the screen, and the line of the prompt and the bar are gone."""

    def holds(text: str) -> bool:
        _, asked, answer = text.rpartition(question)
        return bool(asked) and len(answer.strip()) > 20 and "workspace main ·" not in answer

    return holds


def test_a_chat_that_was_killed_goes_on_where_it_was_committed(talk: Any, tmp_path: Path) -> None:
    first = talk("-w", "main", "-n", "8")
    first.wait_for(READY)
    first.type("What is a lake?\r")
    first.wait_for(lambda text: "tokens/s" in text and READY in text)
    answer = first.text.split("> What is a lake?\n")[1].split("\n[")[0]
    first.type("/set n_predict -1\r")
    first.wait_for("n_predict = -1")
    first.wait_for(READY)
    first.type("Tell me a very long story about it.\r")
    first.wait_for(answering("about it.\n"))
    first.signal(signal.SIGKILL)
    assert first.ended() == -signal.SIGKILL
    second = talk("--continue", "-n", "8")
    text = second.wait_for(READY)
    assert re.search(r"workspace main: \d+ tokens, 1 question", text)
    second.type(f"/export {tmp_path}/talk.jsonl\r")
    second.wait_for(lambda text: "1 question with answers]" in text.replace("\n", "") and READY in text)
    assert [m["content"].split() for m in messages(tmp_path / "talk.jsonl")] == [
        ["What", "is", "a", "lake?"], answer.split(),
    ]  # fmt: skip
    second.type("/stats\r")
    second.wait_for(lambda text: ", 0 from disk" in text and READY in text)  # nothing was read again
    second.type("/new two\r")
    second.wait_for(lambda text: "[workspace two: empty]" in text and READY in text)
    second.type("/switch main\r")
    second.wait_for(lambda text: "[workspace main: " in text and READY in text)
    second.type("/rm two\r")
    second.wait_for("Delete the workspace two?")
    second.type("y\r")
    second.wait_for(lambda text: "[deleted: two]" in text and READY in text)
    second.type("\x04")
    assert second.ended() == 0


def test_ctrl_c_stops_real_work_and_sigterm_commits_an_answer(talk: Any, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("The lake lies between two hills. " * 3000)
    terminal = talk("-w", "main")
    terminal.wait_for(READY)
    terminal.type(f"/read {tmp_path}/long.txt\r")
    terminal.wait_for("tokens/s")
    terminal.type("\x03")
    terminal.wait_for(lambda text: "[stopped at long.txt: " in text and READY in text)
    terminal.type("Tell me a long story.\r")
    terminal.wait_for(answering("long story.\n"))
    terminal.type("\x03")
    terminal.wait_for(lambda text: "[stopped: the answer is kept" in text and READY in text)
    terminal.type("Tell me another story.\r")
    terminal.wait_for(answering("another story.\n"))
    terminal.signal(signal.SIGTERM)
    assert terminal.ended() == 0
    again = talk("--continue")
    again.wait_for(
        lambda text: re.search(r"workspace main: [\d,]+ tokens, 2 questions", text) and READY in text
    )
    again.type("\x04")
    assert again.ended() == 0

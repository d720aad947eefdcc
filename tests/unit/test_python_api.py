"""What a program sees of an engine, its workspaces and running steps; over the fake model."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_durable import Engine, engine_on
from fake_model import END, FakeVocab
from fake_run import checked_sessions, faked_template, text

import kvmem_llama
from kvmem_llama import Finished, Progress, Recalled, RecallParams, SamplingParams, TextPiece, Timings, Usage
from kvmem_llama.errors import (
    Cancelled,
    EngineClosed,
    InputError,
    InvalidOption,
    WorkspaceBusy,
    WorkspaceClosed,
)

pytestmark = pytest.mark.usefixtures("checked", "template")
checked, template = checked_sessions, faked_template
GREEDY = SamplingParams(temp=0)
LONG = "".join(FakeVocab().detokenize(text(1500)).decode())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with engine_on(tmp_path / "store") as it:
        yield it


def hold(engine: Engine) -> threading.Event:
    """Decodes wait for the event."""
    go = threading.Event()
    engine.model.before_decode = lambda batch: go.wait(10) and None
    return go


def said(engine: Engine, workspace: kvmem_llama.Workspace) -> str:
    return engine.detokenize(workspace.history(), special=True)


# -- names


def test_every_public_name_is_there_and_loads_once_it_is_used() -> None:
    for name in kvmem_llama.__all__:
        assert getattr(kvmem_llama, name) is not None, name
    assert dir(kvmem_llama) == sorted(kvmem_llama.__all__)
    with pytest.raises(AttributeError, match="Motor"):
        _ = kvmem_llama.Motor


def test_parameter_objects_and_results_are_frozen() -> None:
    for made in (GREEDY, RecallParams(), Usage(1, 0, 0, 0, 1, 0, 0, 0)):
        with pytest.raises(AttributeError):
            setattr(made, dataclasses.fields(made)[0].name, 3)


# -- adding


def test_texts_files_and_tokens_are_added_without_an_answer(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("under the mat", encoding="utf-8")
    with engine.workspace() as ws:
        assert ws.add("abc").result().text == ""
        ws.add("the key", source="log").result()
        ws.add(file).result()
        ws.add(file, source="other").result()
        ws.add([40, 41]).result()
        ws.add(np.array([42], np.int32)).result()
        vocab = FakeVocab()  # a newline is no character of its own there
        lines = ("log:\nthe key\n\n", "notes.md:\nunder the mat\n\n", "other:\nunder the mat\n\n")
        expected = "abc" + "".join(vocab.detokenize(vocab.tokenize(line)).decode() for line in lines) + "HIJ"
        assert said(engine, ws) == expected
        for what, options, error in (
            (tmp_path / "absent", {}, InputError),
            (tmp_path, {}, InputError),
            ([1, 1000], {}, InvalidOption),
            ([1, 2], {"source": "log"}, InvalidOption),
        ):
            with pytest.raises(error):
                ws.add(what, **options)  # type: ignore[arg-type]
        (tmp_path / "binary").write_bytes(b"a\0b")
        with pytest.raises(InputError, match="binary"):
            ws.add(tmp_path / "binary")
        assert said(engine, ws) == expected


# -- answers


def test_an_answer_gives_its_parts_at_the_end(engine: Engine) -> None:
    with engine.workspace(system="be brief") as ws:
        engine.model.forced = [40, 41, END]
        answer = ws.chat("why?", sampling=GREEDY)
        assert answer.text == "HI" and answer.tokens == (40, 41, END) and answer.finish_reason == "stop"
        assert answer.recall == () and answer.done
        usage, timings = answer.usage, answer.timings
        n = len("(be brief)[why?]:")
        assert usage == Usage(n, 0, 0, 0, n, 3, 0, 0) and usage.total == ws.n_tokens
        assert timings.prefill > 0 and timings.decode > 0
        assert timings.total == pytest.approx(sum(timings[name] for name in timings) - timings["total_s"])
        assert answer.result().usage == usage


def test_usage_and_timings_tell_what_a_recall_did(engine: Engine) -> None:
    with engine.workspace() as ws:
        ws.add(LONG).result()
        was = ws.n_tokens
        answer = ws.chat("why?", sampling=GREEDY, max_tokens=4)
        (report,) = answer.recall
        blocks = [block for block in report.blocks if block.rank]
        usage = answer.usage
        assert len(blocks) == report.n_selected > 0
        assert usage.recalled == sum(block.count for block in blocks) and usage.cached == was
        assert usage.replayed == report.n_replayed >= len("why?]:") and usage.generated == 4
        assert usage.prompt == was + usage.evaluated == ws.n_tokens - 4
        timings = answer.timings
        for name in ("score", "select", "apply", "replay", "decode"):
            assert getattr(timings, name) > 0, name
        assert timings.score == pytest.approx(report.timings.score_s)
        assert timings.refresh == 0 and Timings().apply == 0


def test_a_text_is_completed_without_a_template(engine: Engine) -> None:
    with engine.workspace() as ws:
        ws.chat("why?", sampling=GREEDY, max_tokens=1).result()
        was = said(engine, ws)
        engine.model.forced = [40, 41]
        assert ws.complete("and then ", sampling=GREEDY, max_tokens=2).text == "HI"
        assert said(engine, ws) == f"{was}and then HI" and len(ws.turns()) == 1
        with pytest.raises(InputError, match="empty"):
            ws.complete("")


def test_without_sampling_parameters_the_engines_options_hold(engine: Engine) -> None:
    with engine.workspace() as ws:
        assert ws.chat("why?", max_tokens=2).usage.generated == 2
        assert ws.complete("b", max_tokens=2).usage.generated == 2


def test_recall_parameters_hold_for_one_step(engine: Engine) -> None:
    with engine.workspace() as ws:
        ws.add(LONG).result()
        (before,) = ws.chat("why?", sampling=GREEDY, max_tokens=1).recall
        assert not any(block.refreshed for block in before.blocks)
        (report,) = ws.chat("why?", sampling=GREEDY, max_tokens=1, recall=RecallParams(refresh=16)).recall
        assert sum(block.count for block in report.blocks if block.refreshed) == 16
        (after,) = ws.chat("why?", sampling=GREEDY, max_tokens=1).recall
        assert not any(block.refreshed for block in after.blocks)


def test_a_stickiness_for_one_step_keeps_blocks_of_the_view(engine: Engine) -> None:
    def held(recall: RecallParams | None) -> int:
        with engine.workspace() as ws:
            ws.add(LONG).result()
            ws.complete(LONG[40:60], sampling=GREEDY, max_tokens=0).result()
            found = ws.complete(LONG[700:720], sampling=GREEDY, max_tokens=0, recall=recall).recall
            return found[0].n_held

    assert held(RecallParams(stickiness=1.0)) > 0 == held(None)


@pytest.mark.parametrize("given", [{"refresh": -1}, {"stickiness": 2.0}, {"query_long": "middle"}])
def test_recall_parameters_are_checked_when_they_are_made(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        RecallParams(**given)


# -- ends of steps


def test_leaving_the_loop_cancels_the_step_and_the_workspace_goes_on(engine: Engine) -> None:
    with engine.workspace() as ws:
        ws.add(LONG).result()
        was = said(engine, ws)
        for leave in (TextPiece, Recalled, Progress):
            answer = ws.chat("why?", sampling=GREEDY)
            for event in answer:
                if isinstance(event, leave):
                    break
            assert ws.add("").result().usage.prompt == len(was)  # waits for the end of the cancelled one
            with pytest.raises(Cancelled):
                answer.result()
            assert said(engine, ws) == was and ws.turns() == ()
        assert ws.chat("why?", sampling=GREEDY, max_tokens=2).usage.generated == 2


def test_an_error_in_the_loop_cancels_the_step(engine: Engine) -> None:
    with engine.workspace() as ws:
        answer = ws.chat("why?", sampling=GREEDY)
        with pytest.raises(ZeroDivisionError):
            for _event in answer:
                _ = 1 / 0
        assert ws.history().size == 0
        with pytest.raises(Cancelled):
            _ = answer.text


def test_a_loop_that_ends_with_the_step_keeps_it(engine: Engine) -> None:
    with engine.workspace() as ws:
        answer = ws.chat("why?", sampling=GREEDY, max_tokens=3)
        for event in answer:
            if isinstance(event, Finished):
                break
        assert len(answer.tokens) == 3 and len(ws.turns()) == 1
        unseen = ws.chat("and?", sampling=GREEDY, max_tokens=3)  # nobody watches it
        assert unseen.result().n_generated == 3


def test_leaving_the_with_cancels_what_still_runs(engine: Engine) -> None:
    with engine.workspace() as ws:
        go = hold(engine)
        with ws.chat("why?", sampling=GREEDY) as answer:
            go.set()
        assert answer.done and ws.n_tokens == 0
        with pytest.raises(Cancelled):
            _ = answer.text
        with ws.chat("why?", sampling=GREEDY, max_tokens=2) as answer:
            assert len(answer.text) == 2
        assert ws.n_tokens > 0


def test_a_running_step_keeps_others_away_until_it_is_cancelled(engine: Engine) -> None:
    with engine.workspace() as ws:
        go = hold(engine)
        answer = ws.chat("why?", sampling=GREEDY)
        with pytest.raises(WorkspaceBusy):
            ws.add("x")
        answer.cancel()
        threading.Timer(0.05, go.set).start()
        ws.add("x").result()
        assert said(engine, ws) == "x"


def test_what_a_cancelled_step_has_read_is_not_taken_over_once_the_pins_have_changed(engine: Engine) -> None:
    """It was read over a view without them: a fork, which has nothing to take over, answers the same."""
    with engine.workspace() as ws:
        ws.add(LONG[:900]).result()
        ws.chat("bc", sampling=GREEDY, max_tokens=5).result()
        answer = ws.chat("what?", sampling=GREEDY)
        for event in answer:
            if isinstance(event, TextPiece):
                break
        ws.pin(160, 174)
        with ws.fork() as fork:
            theirs = fork.chat("and why?", sampling=GREEDY, max_tokens=5).result()
        mine = ws.chat("and why?", sampling=GREEDY, max_tokens=5).result()
        assert mine.usage.reused == 0 and mine.tokens == theirs.tokens


# -- pins, search, verify


def test_pins_are_ranges_blocks_and_turns(engine: Engine) -> None:
    with engine.workspace() as ws:
        ws.add(LONG).result()
        (report,) = ws.chat("and?", sampling=GREEDY, max_tokens=2).recall
        chosen = next(block for block in report.blocks if block.rank)
        found = ws.search("why?", 3).blocks
        assert 0 < len(found) <= 3
        spans: list[Any] = [range(8, 16), (24, 40), chosen, found[0], ws.turns()[-1]]
        for span in spans:
            ws.pin(span)
        last = ws.turns()[-1]
        expected = [
            (8, 16),
            (24, 40),
            (chosen.start, chosen.start + chosen.count),
            (found[0].start, found[0].start + found[0].count),
            (last.start, last.end),
        ]
        assert sorted(ws.stats().pins) == sorted(expected)
        ws.unpin(8, 16)
        for span in spans[1:]:
            ws.unpin(span)
        assert ws.stats().pins == ()
        for wrong in (range(0, 16, 2), "span", 5, range(16, 16), (0, 10**6)):
            with pytest.raises(InvalidOption):
                ws.pin(wrong)  # type: ignore[call-overload]


def test_a_stored_workspace_is_verified(engine: Engine) -> None:
    with engine.workspace("notes") as ws:
        ws.add(LONG).result()
        with ws.fork("other"):
            report = ws.verify()
        assert report.is_sound and report.n_workspaces == 2 and report.n_records > 0
        segment = next(engine.core.settings.data_path.rglob("*.gguf"))
        data = np.fromfile(segment, np.uint8)
        data[len(data) // 2 :] ^= 0xFF
        data.tofile(segment)
        assert not ws.verify().is_sound
    with engine.workspace() as ws, pytest.raises(InvalidOption, match="stored"):
        ws.verify()


# -- closing


def test_use_after_close_is_an_error_that_names_what_is_closed(engine: Engine) -> None:
    ws, nameless = engine.workspace("notes"), engine.workspace()
    for _again in range(2):
        ws.close()
        nameless.close()
    calls = (
        lambda w: w.add("x"), lambda w: w.chat("x"), lambda w: w.complete("x"), lambda w: w.search("x"),
        lambda w: w.history(), lambda w: w.fork("y"), lambda w: w.truncate(0), lambda w: w.pin(0, 1),
        lambda w: w.stats(), lambda w: w.verify(), lambda w: w.turns(),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(WorkspaceClosed, match="the workspace 'notes' is closed"):
            call(ws)
        with pytest.raises(WorkspaceClosed, match="the workspace is closed"):
            call(nameless)
    ws = engine.workspace()
    for _again in range(2):
        engine.close()
    for call in calls[:3]:
        with pytest.raises(EngineClosed, match="the engine is closed"):
            call(ws)
    with pytest.raises(EngineClosed):
        engine.workspace()
    ws.close()


def test_what_is_dropped_does_nothing(engine: Engine) -> None:
    """No work is done when an object is collected: a step goes on, a workspace stays as it is."""
    ws = engine.workspace()
    go = hold(engine)
    task = ws.chat("why?", sampling=GREEDY, max_tokens=3)._task
    gc.collect()
    go.set()
    assert task.result(10).n_generated == 3
    policy = ws._policy
    del ws
    gc.collect()
    assert engine.call(lambda core: policy.n_tokens) > 0


# -- threads


def test_an_engine_is_shared_between_threads(engine: Engine) -> None:
    """Each with workspaces of its own, all at once, some of them cancelled; the answers are those of one
    thread alone."""
    with engine.workspace() as ws:
        ws.add(LONG[:600]).result()
        alone = [ws.chat(f"why {i}?", sampling=GREEDY, max_tokens=6).text for i in range(3)]

    def work(number: int) -> list[str]:
        name = f"own-{number}" if number % 2 else None
        with engine.workspace(name) as own:
            own.add(LONG[:600]).result()
            answers = []
            for i in range(3):
                for _event in own.chat("what?", sampling=GREEDY):
                    break
                answers.append(own.chat(f"why {i}?", sampling=GREEDY, max_tokens=6).text)
                assert own.stats().n_tokens == own.n_tokens
            return answers

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(work, range(6))) == [alone] * 6
    assert engine.call(lambda core: core.pool.n_used) == 0


def test_one_workspace_used_by_many_threads_takes_one_step_at_a_time(engine: Engine) -> None:
    with engine.workspace() as ws:
        done, refused = [], []

        def add(number: int) -> None:
            for _ in range(10):
                try:
                    ws.add(chr(97 + number) * 5).result()
                    done.append(number)
                except WorkspaceBusy:
                    refused.append(number)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(add, range(4)))
        history = said(engine, ws)
        pieces = {history[i : i + 5] for i in range(0, len(history), 5)}
        assert len(history) == 5 * len(done) > 0 and all(len(set(piece)) == 1 for piece in pieces)


def test_closing_the_engine_ends_what_other_threads_wait_for(engine: Engine) -> None:
    ws = engine.workspace()
    answer = ws.chat("why?", sampling=GREEDY)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            answer.result(10)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    engine.close()
    thread.join(10)
    assert len(caught) == 1 and isinstance(caught[0], EngineClosed)
    ws.close()

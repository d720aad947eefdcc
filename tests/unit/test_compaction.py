"""The policy `compaction` on the fake model, with and without hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compaction_run import (
    MOST,
    SINK,
    VIEW,
    VOCAB,
    CompactionRun,
    Writer,
    summary_writer,
    words,
)
from fake_model import END, FakeVocab
from fake_run import checked_sessions, request, text
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.errors import Cancelled, DecodeFailed, InvalidOption, MandatoryTooLarge
from kvmem_llama.memory.report import Finished, Progress, TextPiece
from kvmem_llama.policies import make_policy, summary
from kvmem_llama.policies.compacted import Compacted
from kvmem_llama.policies.compaction import Compaction
from kvmem_llama.policies.full_context import FullContext

pytestmark = pytest.mark.usefixtures("checked")
checked, writer = checked_sessions, summary_writer
HOOKS = pytest.mark.parametrize("hooks", [True, False], ids=["hooks", "no hooks"])
NOTHING = np.zeros(0, np.int32)


# -- arithmetic


@given(st.data())
def test_what_is_replaced_and_what_stays_are_what_was_there(data: Any) -> None:
    question = (300, 340) if data.draw(st.booleans()) else None
    now, t = Compacted(0, 8, None, NOTHING), 0
    for _ in range(4):
        t = data.draw(st.integers(max(t, now.cut, question[1] if question else 0), t + 600))
        cut, kept = now.plan(t, data.draw(st.integers(0, 200)), question)
        then = Compacted(t, cut, kept, NOTHING)
        pieces = [range(*r) for r in (*now.replaced(cut, kept), *then.ranges(t))]
        before = [p for r in now.ranges(t) for p in range(*r)]
        assert sorted(p for piece in pieces for p in piece) == before
        if question:
            assert set(range(*question)) <= {p for r in then.ranges(t) for p in range(*r)}
        now = then


# -- reading and answering


@HOOKS
def test_a_history_that_fits_is_plain_decoding(hooks: bool) -> None:
    run, plain = CompactionRun(hooks=hooks), CompactionRun(FullContext)
    for one in (run, plain):
        one.read(text(500))
    result = run.ask(text(40, 1), 100)
    assert result.tokens == plain.ask(text(40, 1), 100).tokens and result.recalls == ()
    assert (result.n_read, result.n_query, result.n_generated) == (0, 40, 100)
    assert run.policy.summary == "" and run.model.n_calls == plain.model.n_calls
    assert np.array_equal(run.policy.tokens(), plain.policy.tokens())


@HOOKS
def test_it_reads_and_answers_without_end(hooks: bool) -> None:
    run = CompactionRun(hooks=hooks)
    base = text(4000)
    assert run.read(base).n_read == 4000
    run.check_cells()
    result = run.ask(text(60, 1), 1500)
    assert result.n_generated == 1500 and result.finish_reason == "length"
    run.check_cells()
    assert np.array_equal(run.policy.tokens(0, 4060), np.concatenate([base, text(60, 1)]))
    assert run.policy.tokens(4060).tolist() == list(result.tokens)
    view = run.policy._view_tokens(run.policy.n_tokens)
    assert np.array_equal(view[:SINK], base[:SINK])
    assert np.array_equal(view[-200:], run.policy.tokens()[-200:])
    assert max(position for batch in run.model.batches for _, position, _ in batch) < VIEW


def test_the_summary_of_the_replaced_text_takes_its_place(writer: Writer) -> None:
    run = CompactionRun()
    base = text(1100)
    base[100:103] = END  # control tokens are no text
    writer.says = [words("  It began. "), words(" It went on. ")]
    run.read(base)
    (state,) = run.policy._compactions
    assert (state.at, state.cut, state.kept) == (VIEW, VIEW - VIEW // 4, None)
    replaced = base[SINK : state.cut]
    assert [t for _, piece in writer.seen for t in piece] == replaced[replaced != END].tolist()
    assert [before for before, _ in writer.seen] == ["", "It began."]
    assert run.policy.summary == "It went on."
    head, end = (VOCAB.tokenize(mark) for mark in (summary.HEAD, summary.END))
    front = [*base[:SINK], *head, *VOCAB.tokenize("It went on."), *end]
    assert run.policy._view_tokens(1100).tolist() == [*front, *base[state.cut :]]
    run.check_cells()
    writer.says = [words("Then it ended.")] * 4
    run.read(text(700, 1))
    assert writer.seen[2][0] == "It went on." and run.policy.summary == "Then it ended."
    again = np.concatenate([base, text(700, 1)])[state.cut : run.policy._now.cut]
    assert [t for _, piece in writer.seen[2:] for t in piece] == again.tolist()


def test_prompts_fit_the_view_and_a_summary_is_bounded(writer: Writer) -> None:
    run = CompactionRun()
    run.read(text(3000))
    assert len(run.policy._now.summary) == MOST == run.policy._summarizer.n_summary  # it never ends by itself
    assert all(len(piece) <= run.policy._summarizer._n_piece for _, piece in writer.seen)
    assert max(position for batch in run.model.batches for _, position, _ in batch) < VIEW
    run.check_cells()


def test_a_model_that_writes_nothing_leaves_the_summary_as_it_was(writer: Writer) -> None:
    run = CompactionRun()
    writer.says = [[END], words("   ")]
    run.read(text(1100))
    assert len(run.policy._compactions) == 1 and run.policy.summary == ""
    assert len(run.policy._view_tokens(1100)) == SINK + 1100 - run.policy._now.cut
    run.check_cells()
    writer.says = [words("Something.")] * 4
    run.read(text(900, 1))
    writer.says = [[END]] * 4
    run.read(text(900, 2))
    assert len(run.policy._compactions) == 3 and run.policy.summary == "Something."


def test_a_summary_ends_where_the_template_says_a_turn_ends(writer: Writer) -> None:
    run = CompactionRun()
    stop = VOCAB.tokenize("\nUser:").tolist()
    pieces = {72: b"\n"}  # the fake vocabulary has no line end of its own
    usual = FakeVocab.piece
    vocab: Any = run.core.model.vocab
    vocab.piece = lambda t, special=True: pieces.get(t) or usual(vocab, t, special=special)
    writer.says = [[*words("Brief")[:-1], *stop, 20, 20]] * 2
    run.read(text(1100))
    assert run.policy.summary == "Brief"


def test_before_a_question_without_room_the_history_is_compacted() -> None:
    run = CompactionRun()
    run.read(text(800))
    result = run.ask(text(100, 1), 5)  # 800 + 100 + 128 > 1024
    (state,) = run.policy._compactions
    assert (state.at, state.cut) == (800, 800 - VIEW // 4) and result.n_query == 100
    run.check_cells()
    other = CompactionRun()
    other.read(text(796))
    other.ask(text(100, 1), 5)
    assert not other.policy._compactions


def test_the_question_stays_as_it_is_however_long_the_answer() -> None:
    run = CompactionRun()
    run.read(text(600))
    question = text(200, 1)
    task = run.task(run.policy.step(request(question, 2000)))
    views = []
    while not task.done:
        run.drive(task, batches=50)
        if run.policy._asked and len(run.policy._cells.held):
            views.append(VOCAB.detokenize(run.policy._view_tokens(len(run.policy._tokens))))
    assert len(run.policy._compactions) > 3 and run.policy._compactions[-1].kept == (600, 800)
    assert all(VOCAB.detokenize(question) in view for view in views) and len(views) > 30
    run.check_cells()
    run.ask(text(300, 2), 5)
    assert run.policy._now.kept is None  # the next compaction takes it along
    run.check_cells()


@pytest.mark.parametrize("options", [{"n_recent": 0}, {"n_recent": 0, "block_size": 1, "n_reserve": 1}])
def test_an_answer_goes_on_from_its_newest_tokens_even_if_nothing_is_recent(options: Any) -> None:
    run = CompactionRun(**options)
    run.read(text(600))
    task = run.task(run.policy.step(request(text(60, 1), 400)))
    while not run.policy._compactions:
        run.drive(task, batches=1)
    assert len(run.policy._tokens) == VIEW
    newest = run.policy._tokens[-1]
    assert run.policy._view_tokens(VIEW)[-1] == newest
    run.drive(task)
    assert task.result(0).n_generated == 400
    run.check_cells()


def test_a_long_question_is_read_as_history_up_to_its_newest_tokens() -> None:
    run = CompactionRun(n_query=64)
    result = run.ask(text(2000), 5)
    assert (result.n_read, result.n_query) == (1936, 64) and run.policy.n_tokens == 2005
    run.check_cells()


# -- refusals


def test_a_question_is_refused_before_any_decode_if_its_hard_set_is_one_token_too_large() -> None:
    run = CompactionRun(n_query=VIEW, n_reserve=8)
    run.read(text(1100))
    calls, fixed = run.model.n_calls, SINK + run.policy._summarizer.n_framed + 8
    with pytest.raises(MandatoryTooLarge) as raised:
        run.ask(text(VIEW - fixed + 1, 1), 5)
    assert (raised.value.n_needed, raised.value.n_view) == (VIEW + 1, VIEW)
    assert run.model.n_calls == calls and run.policy.n_tokens == 1100
    assert run.ask(text(VIEW - fixed, 1), 20).n_generated == 20
    run.check_cells()


def test_a_view_too_small_for_a_summary_is_refused() -> None:
    run = CompactionRun(n_ctx=256)
    with pytest.raises(MandatoryTooLarge, match="-c"):
        run.read(text(10))
    assert not run.model.n_calls and run.policy.n_tokens == 0


def test_pins_are_refused() -> None:
    run = CompactionRun()
    with pytest.raises(InvalidOption):
        run.policy.pin(0, 1)


# -- cancel, stop, failures


def writing(run: CompactionRun) -> bool:
    first = run.policy._summarizer._prompt[0].tolist()
    return run.policy._cells.held[: len(first)].tolist() == first


def until_writing(run: CompactionRun, task: Any) -> None:
    while not writing(run):
        assert not task.done
        run.drive(task, batches=1)


def as_if_alone(run: CompactionRun, n: int) -> None:
    """The next question is answered as by a memory that has read the first `n` tokens and nothing else."""
    twin = CompactionRun()
    twin.read(run.policy.tokens())
    assert run.policy.n_tokens == n
    assert [s.at for s in run.policy._compactions] == [s.at for s in twin.policy._compactions]
    assert run.ask(text(30, 9), 20).tokens == twin.ask(text(30, 9), 20).tokens
    run.check_cells()


@pytest.mark.parametrize("how", ["cancel", "stop"])
@pytest.mark.parametrize("more", [0, 5, 120])
def test_a_step_cancelled_while_a_summary_is_written_is_undone(how: str, more: int) -> None:
    run = CompactionRun()
    run.read(text(1000))
    task = run.task(run.policy.read(text(900, 1)))
    until_writing(run, task)
    run.drive(task, batches=more)
    assert writing(run)
    getattr(task, how)()
    run.drive(task)
    assert isinstance(task.error, Cancelled)
    as_if_alone(run, 1000)


def test_a_failed_decode_of_a_summary_undoes_the_step() -> None:
    run = CompactionRun()
    run.read(text(1000))
    task = run.task(run.policy.step(request(text(60, 1), 20)))
    until_writing(run, task)
    run.model.fail[run.model.n_calls + 1] = 1
    run.drive(task)
    assert isinstance(task.error, DecodeFailed) and run.core.pool.n_used == 0
    as_if_alone(run, 1000)


def in_the_middle_of_an_answer() -> tuple[CompactionRun, Any]:
    run = CompactionRun()
    run.read(text(600))
    task = run.task(run.policy.step(request(text(60, 1), 1000)))
    until_writing(run, task)
    run.drive(task, batches=3)
    return run, task


def test_an_answer_stopped_while_it_waits_for_room_is_kept() -> None:
    run, task = in_the_middle_of_an_answer()
    task.stop()
    run.drive(task)
    result = task.result(0)
    assert (result.finish_reason, result.n_generated) == ("truncated", VIEW - 660)
    assert run.policy.n_tokens == VIEW and not run.policy._compactions
    run.ask(text(30, 2), 20)
    assert run.policy._compactions[0].at == VIEW
    run.check_cells()


def test_an_answer_cancelled_while_it_waits_for_room_is_undone() -> None:
    run, task = in_the_middle_of_an_answer()
    task.cancel()
    run.drive(task)
    assert isinstance(task.error, Cancelled)
    as_if_alone(run, 600)


def test_a_stop_string_takes_back_tokens_from_before_a_summary(writer: Writer) -> None:
    run = CompactionRun()
    run.read(text(600))
    n = VIEW - 660
    plain = CompactionRun(FullContext)
    plain.read(text(600))
    answer = plain.ask(text(60, 1), n).tokens
    tail = VOCAB.detokenize(np.array(answer[-3:])).decode()
    writer.says = [words("It was so.")] * 4
    first = CompactionRun()
    first.read(text(600))
    writer.says = [words("It was so.")] * 4
    after = first.ask(text(60, 1), n + 1).tokens[-1]
    writer.says = [words("It was so.")] * 4
    stop = tail + VOCAB.piece(after).decode()
    result = run.ask(text(60, 1), -1, stop=[stop])
    assert result.tokens == answer[:-3] and run.policy.n_tokens == VIEW - 3
    assert not run.policy._compactions
    run.ask(text(30, 2), 5)
    run.check_cells()


# -- truncate, fork, evict


@pytest.mark.parametrize("n", [0, 3, 700, 1023, 1024, 1300, 2999])
def test_a_truncated_history_goes_on_as_if_there_had_been_no_more(n: int) -> None:
    run = CompactionRun()
    run.read(text(3000))
    assert run.policy._compactions[0].at == VIEW
    run.policy.truncate(n)
    twin = CompactionRun()
    twin.read(text(3000)[:n])
    assert np.array_equal(run.policy.tokens(), twin.policy.tokens())
    assert [s.at for s in run.policy._compactions] == [s.at for s in twin.policy._compactions]
    assert run.ask(text(30, 1), 20).tokens == twin.ask(text(30, 1), 20).tokens
    run.check_cells()


@HOOKS
def test_cells_that_were_given_up_are_read_again(hooks: bool) -> None:
    run, twin = CompactionRun(hooks=hooks), CompactionRun()
    for one in (run, twin):
        one.read(text(1500))
    run.policy.evict()
    assert run.core.pool.n_used == 0
    assert run.ask(text(30, 1), 20).tokens == twin.ask(text(30, 1), 20).tokens
    run.check_cells()


def test_a_fork_has_the_summary_and_goes_its_own_way() -> None:
    run = CompactionRun(n_parallel=2)
    run.read(text(1500))
    fork = run.policy.fork()
    want = run.ask(text(30, 1), 600)
    assert fork.n_tokens == 1500 and fork.summary and len(fork._compactions) == 1
    run.policy.evict()
    run.policy = fork
    assert run.ask(text(30, 1), 600).tokens == want.tokens
    run.check_cells()


def test_two_sequences_at_once_answer_as_if_alone() -> None:
    alone = []
    for seed in range(2):
        run = CompactionRun()
        run.read(text(1500, seed))
        alone.append(run.ask(text(30, 5), 700).tokens)
    run = CompactionRun(n_parallel=2)
    policies = [run.policy, Compaction(run.core)]
    tasks = [run.task(p.read(text(1500, i)), i) for i, p in enumerate(policies)]
    run.drive(*tasks)
    tasks = [run.task(p.step(request(text(30, 5), 700)), i) for i, p in enumerate(policies)]
    run.drive(*tasks)
    assert [task.result(0).tokens for task in tasks] == alone


def test_a_model_whose_sequences_cannot_be_cut_reads_the_view_again() -> None:
    run, twin = CompactionRun(hooks=False), CompactionRun()
    usual = run.model.remove
    run.model.remove = lambda seq, first=0, end=-1: not first and usual(seq)  # type: ignore[method-assign]
    for one in (run, twin):
        one.read(text(1500))
    assert run.ask(text(30, 1), 400).tokens == twin.ask(text(30, 1), 400).tokens


# -- what it tells


def test_events_name_every_phase_and_hold_nothing_of_a_summary() -> None:
    run = CompactionRun()
    run.read(text(1000))
    run.events.clear()
    result = run.ask(text(60, 1), 1100)
    phases = [e.phase for e in run.events if isinstance(e, Progress)]
    assert list(dict.fromkeys(phases)) == ["summary", "replay", "query"]
    for phase in ("summary", "replay"):
        seen = [e for e in run.events if isinstance(e, Progress) and e.phase == phase]
        assert all(0 < e.done <= e.total for e in seen) and seen[-1].done == seen[-1].total
    assert isinstance(run.events[-1], Finished) and run.events[-1].result is result
    assert "".join(e.text for e in run.events if isinstance(e, TextPiece)) == result.text
    assert set(result.timings) == {
        "read_s", "summary_s", "score_s", "query_s", "decode_s", "total_s"
    } and result.timings["summary_s"] > 0  # fmt: skip


def test_it_is_found_by_name_and_counts_its_tokens() -> None:
    run = CompactionRun(lambda core: make_policy("compaction", core))
    run.read(text(1500))
    stats = run.policy.stats()
    assert (stats.policy, stats.n_tokens, stats.n_view) == ("compaction", 1500, VIEW)
    assert stats.n_resident == stats.n_cells_used == len(run.policy._view_tokens(1500))
    run.policy.evict()
    run.policy.close()
    assert run.core.pool.n_used == 0 and run.policy.n_tokens == 0

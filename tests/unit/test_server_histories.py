"""Which stored history a request is answered in."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from fake_histories import FakeEngine, FakeWorkspace, LetterVocab

from kvmem_llama.errors import Cancelled, StoreFull, WorkspaceBusy
from kvmem_llama.native.layout import I32
from kvmem_llama.server import histories as module
from kvmem_llama.server.choosing import Choice, choose, n_common
from kvmem_llama.server.histories import MIN_STORED, Histories
from kvmem_llama.server.history import History, Lease
from kvmem_llama.settings import Settings

VOCAB: Any = LetterVocab()


def tokens(n: int, seed: int = 0) -> I32:
    return np.random.default_rng(seed).integers(97, 123, n).astype(np.int32)


def after(*parts: I32) -> I32:
    return np.concatenate(parts)


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    return FakeEngine(Settings(data_dir=str(tmp_path)))


@pytest.fixture
def known(engine: FakeEngine) -> Histories:
    return Histories(cast(Any, engine), 2)


def answered(known: Histories, lease: Lease, prompt: I32, answer: I32) -> History:
    cast(FakeWorkspace, lease.workspace).answered(after(prompt, answer))
    known.give_back(lease, n_prompt=len(prompt))
    return lease.history


def ask(known: Histories, prompt: I32, *, owner: str = "", answer: I32 | None = None, **how: Any) -> History:
    """A whole request."""
    lease = known.take(owner, prompt, **how)
    return answered(known, lease, prompt, tokens(20, 99) if answer is None else answer)


# -- what is in common


def test_common_tokens_are_counted_by_their_text() -> None:
    stored = np.array([65, 366, 68, 69], np.int32)  # A BC D E; 366 is B and C
    assert n_common(stored, np.array([65, 66, 67, 68, 70], np.int32), VOCAB) == 3
    assert n_common(stored, np.array([65, 66, 88], np.int32), VOCAB) == 1
    assert n_common(stored, stored, VOCAB) == 4
    assert n_common(stored, np.array([66], np.int32), VOCAB) == 0


def known_one(stored: I32, prompt_end: int, *, is_unfinished: bool = False) -> Any:
    history = History("", None, is_auto=True)
    history.tokens, history.prompt_end, history.is_unfinished = stored, prompt_end, is_unfinished
    return history


@pytest.mark.parametrize(
    ("n_shared", "n_wanted", "plan"),
    [
        (320, 400, "go_on"),  # all of it, the answer included
        (300, 400, "go_on"),  # all but the answer
        (290, 400, "go_on"),  # the beginning of the answer is rendered in another way
        (280, 400, "fork"),
        (280, 280, "fork"),  # an earlier prompt once more
        (200, 400, "new"),
    ],
)
def test_a_history_goes_on_if_nothing_but_its_answer_is_lost(n_shared: int, n_wanted: int, plan: str) -> None:
    stored = tokens(320)
    wanted = after(stored[:n_shared], tokens(n_wanted - n_shared, 5) - 32)
    assert choose([known_one(stored, 300)], wanted, VOCAB)[0].plan == plan


def test_an_edit_of_a_long_history_that_leaves_most_of_it_goes_on() -> None:
    stored = tokens(4000)
    reminder = tokens(30, 3) - 32
    wanted = after(stored[:2000], reminder, stored[2000:], tokens(50, 4) - 32)
    assert choose([known_one(stored, 3900)], wanted, VOCAB)[0].plan == "go_on"
    assert choose([known_one(stored, 3900)], wanted, VOCAB, spans=False)[0].plan == "fork"
    other = after(stored[:2000], tokens(3000, 4) - 32)
    assert choose([known_one(stored, 3900)], other, VOCAB)[0].plan == "fork"


def test_of_several_histories_the_longest_in_common_is_the_first_choice() -> None:
    long, short = tokens(600), tokens(400)
    wanted = after(long, tokens(9, 5))
    found = choose([known_one(short, 380), known_one(long, 580)], wanted, VOCAB)
    assert [(c.plan, c.number) for c in found] == [("go_on", 1), ("go_on", 0), ("new", -1)]


def test_an_edit_at_the_very_beginning_of_a_long_history_goes_on() -> None:
    stored = tokens(2000)
    wanted = after(stored[:20], tokens(3, 3) - 32, stored[23:], tokens(50, 4) - 32)
    others = [known_one(after(stored[:40], tokens(900, seed)), 900) for seed in (7, 8)]
    assert choose([*others, known_one(stored, 1900)], wanted, VOCAB)[0] == Choice("go_on", 2, 1997)
    for other in (
        after(stored[:20], tokens(2000, 9) - 32),
        after(stored[:20], tokens(3, 3) - 32, stored[23:1890], tokens(50, 4) - 32),  # another question
    ):
        assert choose([known_one(stored, 1900)], other, VOCAB)[0].plan == "new"


def test_what_an_edit_keeps_counts_for_more_than_a_longer_beginning() -> None:
    stored = tokens(2000)
    date = tokens(2, 3) - 32
    today = after(stored[:300], date, stored[302:400])  # another conversation of the same day
    wanted = after(stored[:300], date, stored[302:], tokens(50, 4) - 32)
    found = choose([known_one(after(today, tokens(60, 5)), 450), known_one(stored, 1900)], wanted, VOCAB)
    assert [(c.plan, c.number) for c in found] == [("go_on", 1), ("fork", 0), ("new", -1)]


def test_what_was_only_read_is_gone_on_with_or_left() -> None:
    stored = tokens(600)
    assert choose([known_one(stored, 600, is_unfinished=True)], stored, VOCAB)[0].plan == "go_on"
    other = after(stored[:500], tokens(100, 5) - 32)
    assert choose([known_one(stored, 600, is_unfinished=True)], other, VOCAB)[0].plan == "new"


# -- requests


def test_a_conversation_stays_in_its_history(known: Histories, engine: FakeEngine) -> None:
    prompt = tokens(40)
    first = ask(known, prompt)
    second = ask(known, after(prompt, tokens(20, 99), tokens(30, 1)))
    assert second is first
    assert len(engine.opened) == 1


def test_a_side_request_leaves_the_conversation_as_it_is(known: Histories) -> None:
    prompt = tokens(900)
    talk = ask(known, prompt)
    title = ask(known, tokens(60, 7))
    summary = ask(known, after(prompt[:800], tokens(60, 8) - 32))
    assert len({id(talk), id(title), id(summary)}) == 3
    assert talk.tokens.tolist() == after(prompt, tokens(20, 99)).tolist()
    assert ask(known, after(prompt, tokens(20, 99), tokens(9, 1))) is talk


def test_a_long_prompt_is_stored_and_a_short_one_is_not(known: Histories) -> None:
    assert ask(known, tokens(MIN_STORED)).name is not None
    assert ask(known, tokens(MIN_STORED - 1, 1)).name is None


def test_a_conversation_that_becomes_long_is_stored_without_being_read_again(known: Histories) -> None:
    prompt = tokens(1000)
    short = ask(known, prompt)
    longer = after(prompt, tokens(20, 99), tokens(200, 1))
    lease = known.take("", longer)
    assert lease.source is short
    assert lease.history.is_stored
    stored = answered(known, lease, longer, tokens(9, 2))
    assert ask(known, after(longer, tokens(9, 2), tokens(9, 3))) is stored
    assert short.workspace is None


def test_a_step_that_fails_on_the_way_to_the_disk_loses_nothing(known: Histories) -> None:
    prompt = tokens(1000)
    short = ask(known, prompt)
    longer = after(prompt, tokens(20, 99), tokens(200, 1))
    known.give_back(known.take("", longer), n_prompt=None)
    assert known.take("", longer).source is short


def test_a_cancelled_prompt_is_found_again(known: Histories) -> None:
    prompt = tokens(2000)
    lease = known.take("", prompt)
    known.give_back(lease, n_prompt=None, unfinished=prompt)
    again = known.take("", prompt)
    assert again.history is lease.history
    assert len(again.workspace.history()) == 0
    known.give_back(again, n_prompt=None, unfinished=prompt)
    assert known.take("", prompt).history is lease.history


def test_a_fork_whose_step_fails_is_gone_and_one_that_was_cancelled_is_found_again(known: Histories) -> None:
    prompt = tokens(1500)
    talk = ask(known, prompt)
    other = after(prompt[:1400], tokens(300, 8) - 32)
    failed = known.take("", other)
    assert failed.history is not talk
    known.give_back(failed, n_prompt=None)
    cancelled = known.take("", other)
    assert cancelled.history is not failed.history
    known.give_back(cancelled, n_prompt=None, unfinished=other)
    assert known.take("", other).history is cancelled.history
    assert known.take("", after(prompt, tokens(20, 99), tokens(9, 1))).history is talk


def test_owners_do_not_see_each_others_histories(known: Histories) -> None:
    prompt = tokens(1500)
    mine, theirs = ask(known, prompt, owner="a" * 24), ask(known, prompt, owner="b" * 24)
    assert mine is not theirs
    assert mine.name is not None
    assert mine.name.startswith("key-" + "a" * 24)
    assert ask(known, prompt, owner="a" * 24) is mine


def test_a_busy_history_is_waited_for_if_much_would_be_read_again(known: Histories) -> None:
    prompt = tokens(900)
    ask(known, prompt)
    longer = after(prompt, tokens(20, 99), tokens(9, 1))
    running = known.take("", longer)
    found: list[Lease] = []
    waiter = threading.Thread(target=lambda: found.append(known.take("", longer, timeout=30)))
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    answered(known, running, longer, tokens(5, 2))
    waiter.join(30)
    assert found[0].history is running.history


def test_a_busy_history_is_left_alone_if_little_would_be_read_again(known: Histories) -> None:
    prompt = tokens(100)
    ask(known, prompt)
    longer = after(prompt, tokens(20, 99), tokens(9, 1))
    running = known.take("", longer)
    assert known.take("", longer).history is not running.history


def test_waiting_ends(known: Histories) -> None:
    prompt = tokens(900)
    running = known.take("", prompt)
    running.history.tokens = prompt
    with pytest.raises(WorkspaceBusy):
        known.take("", prompt, timeout=0.01)


def test_who_has_gone_waits_no_longer(known: Histories) -> None:
    prompt = tokens(900)
    running = known.take("", prompt)
    running.history.tokens = prompt
    with pytest.raises(Cancelled):
        known.take("", prompt, timeout=30, is_wanted=lambda: False)


def test_without_room_for_a_fork_the_conversation_stays(known: Histories, engine: FakeEngine) -> None:
    prompt = tokens(1500)
    history = ask(known, prompt)
    title = after(prompt[:1200], tokens(40, 5) - 32)
    engine.is_full = True
    for wanted in (title, title):
        with pytest.raises(StoreFull):
            known.take("", wanted)
    engine.is_full = False
    assert not history.is_busy
    assert ask(known, title) is not history
    assert ask(known, after(prompt, tokens(20, 99), tokens(30, 1))) is history


def test_a_workspace_that_cannot_be_closed_keeps_nobody_waiting(
    known: Histories, engine: FakeEngine, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "N_OPEN", 0)
    stored = [ask(known, tokens(MIN_STORED, i)) for i in range(4)]
    engine.close_fails = True
    ask(known, tokens(MIN_STORED, 9))
    engine.close_fails = False
    short = ask(known, tokens(900, 20))
    engine.close_fails = True
    long = ask(known, after(tokens(900, 20), tokens(20, 99), tokens(200, 21)))
    engine.close_fails = False
    assert not any(h.is_busy for h in (*stored, short, long))


def test_a_workspace_that_was_closed_for_others_is_found_again(known: Histories, engine: FakeEngine) -> None:
    prompt = tokens(1500)
    history = ask(known, prompt)
    assert history.name is not None
    with known.closed(history.name):
        assert history.workspace is None
        with pytest.raises(WorkspaceBusy):
            known.take("", prompt, timeout=0.01)
    assert ask(known, prompt) is history


def test_a_named_workspace_goes_on_or_is_added_to(known: Histories, engine: FakeEngine) -> None:
    prompt = tokens(300)
    first = known.take("", prompt, name="notes")
    assert not first.append
    answered(known, first, prompt, tokens(20, 99))
    goes_on = known.take("", after(prompt, tokens(20, 99), tokens(9, 1)), name="notes")
    assert (goes_on.append, goes_on.history) == (False, first.history)
    known.give_back(goes_on, n_prompt=300)
    other = known.take("", tokens(50, 8), name="notes")
    assert other.append
    known.give_back(other, n_prompt=300)
    assert ask(known, after(prompt, tokens(20, 99))) is not first.history  # only by its name
    assert "notes" in engine.stored


def test_a_named_workspace_is_edited_only_by_who_tells_its_past(known: Histories) -> None:
    prompt = tokens(3000)
    answered(known, known.take("", prompt, name="notes"), prompt, tokens(20, 99))
    edit = after(prompt[:1000], tokens(5, 3) - 32, prompt[1005:2950], tokens(60, 4) - 32)
    message = known.take("", edit, name="notes", may_edit=False)
    assert message.append
    known.give_back(message, n_prompt=3000)
    assert not known.take("", edit, name="notes").append


def test_nothing_stored_is_used_where_that_is_asked_for(known: Histories) -> None:
    prompt = tokens(100)
    assert ask(known, prompt) is not ask(known, prompt, fresh=True)


def test_a_history_that_somebody_else_has_is_not_waited_for(known: Histories, engine: FakeEngine) -> None:
    prompt = tokens(1500)
    history = ask(known, prompt)
    assert history.workspace is not None
    history.workspace.close()
    history.workspace = None
    engine.locked.add(str(history.name))
    assert ask(known, prompt) is not history


def test_how_many_are_open_is_bounded(known: Histories, engine: FakeEngine, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "N_IN_RAM", 3)
    stored = [ask(known, tokens(MIN_STORED, i)) for i in range(module.N_OPEN + 5)]
    in_ram = [ask(known, tokens(50, 100 + i)) for i in range(6)]
    assert sum(h.workspace is not None for h in stored) == module.N_OPEN + 2
    assert stored[0].workspace is None
    assert [h.workspace is not None for h in in_ram] == [False, False, False, True, True, True]
    assert ask(known, after(tokens(MIN_STORED, 0), tokens(20, 99))) is stored[0]  # it was only closed
    assert sum(not w.is_closed for w in engine.opened) == module.N_OPEN + 2 + 3


def test_an_erased_history_is_gone(known: Histories) -> None:
    prompt = tokens(100)
    history = ask(known, prompt)
    assert known.erase(history)
    assert ask(known, prompt) is not history


def test_instructions_stay_in_view_as_far_as_a_quarter_of_it_holds_them(known: Histories) -> None:
    prompt = tokens(1000)
    lease = known.take("", prompt)
    lease.history.n_head = 900
    short = answered(known, lease, prompt, tokens(20, 99))
    assert cast(FakeWorkspace, lease.workspace).pins == [(0, 64)]
    longer = after(prompt, tokens(20, 99), tokens(100, 1))
    stored = known.take("", longer)
    assert stored.source is short
    answered(known, stored, longer, tokens(9, 2))
    assert cast(FakeWorkspace, stored.workspace).pins == [(0, 64)]
    assert stored.history.n_pinned == 64


def test_closing_closes_all(known: Histories, engine: FakeEngine) -> None:
    ask(known, tokens(100))
    ask(known, tokens(MIN_STORED, 1))
    known.close()
    assert all(workspace.is_closed for workspace in engine.opened)

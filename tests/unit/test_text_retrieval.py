"""Search by words, and the policy `compaction_retrieval` on the fake model."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any

import numpy as np
import pytest
import xxhash
from compaction_run import SINK, VIEW, VOCAB, CompactionRun
from fake_run import checked_sessions, request, text
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.errors import Cancelled
from kvmem_llama.lexical import RULES, WordIndex, terms, words
from kvmem_llama.memory.report import Recalled
from kvmem_llama.policies import make_policy
from kvmem_llama.policies import text_retrieval as module
from kvmem_llama.policies.compaction import Compaction
from kvmem_llama.policies.text_retrieval import CompactionRetrieval

pytestmark = pytest.mark.usefixtures("checked")
checked = checked_sessions
HOOKS = pytest.mark.parametrize("hooks", [True, False], ids=["hooks", "no hooks"])
BLOCK = 8

# -- words


@pytest.mark.parametrize(
    "said, found",
    [
        ("The Cat, the cat!", ["the", "cat", "the", "cat"]),
        ("parse_config", ["parse_config", "parse", "config"]),
        ("parseConfig", ["parse_config", "parse", "config"]),
        ("HTTPServer2", ["http_server_2", "http", "server", "2"]),
        ("src/io/read.py:12", ["src_io_read_py_12", "src", "io", "read", "py", "12"]),
        (r"C:\temp\a", ["c_temp_a", "c", "temp", "a"]),
        ("v1.2.3", ["v_1_2_3", "v", "1", "2", "3"]),
        ("HTTP ID x", ["http", "id", "x"]),
        ("__init__ -- ...", ["init"]),
        ("Ärger über \uff21\uff22", ["ärger", "über", "ab"]),
        ("東京へ go", ["東", "京", "へ", "go"]),
        ("", []),
    ],
)
def test_words_of_a_text(said: str, found: list[str]) -> None:
    assert words(said) == found


def test_what_is_kept_of_words_changes_only_with_its_version() -> None:
    """A store keeps terms: whoever changes them counts up RULES, and then these numbers."""
    kept = terms("The naïve parseConfig: v2 / 東京へ 1ʳᵉ Ångström, ばら が")
    assert (RULES, xxhash.xxh3_64_hexdigest(kept.astype("<u8").tobytes())) == (1, "ee70d2645e264580")


def test_accents_do_not_matter_and_other_marks_do() -> None:
    np.testing.assert_array_equal(terms("Élan vital über"), terms("elan Vital uber"))
    assert len(set(terms("か が は ば ぱ 한 하").tolist())) == 7


def index_of(*texts: str, first: int = 1) -> WordIndex:
    index = WordIndex(first)
    index.add([terms(text) for text in texts])
    return index


@pytest.fixture
def index() -> WordIndex:
    return index_of("the red fox", "a parseConfig call", "the blue fox ran", "東京の天気")


def found(index: WordIndex, said: str) -> dict[int, float]:
    numbers, scores, _ = index.search(said)
    assert np.all(scores > 0) and np.all(np.diff(numbers) > 0)
    return dict(zip(numbers.tolist(), scores.tolist(), strict=True))


def test_rarer_words_count_more_and_identifiers_are_found_in_any_style(index: WordIndex) -> None:
    scores = found(index, "Was the FOX blue?")
    assert set(scores) == {1, 3} and scores[3] > scores[1]
    assert set(found(index, "where is parse_config")) == {2} == set(found(index, "CONFIG"))
    assert set(found(index, "京")) == {4}
    assert found(index, "") == found(index, '" OR ) * ^ NEAR(') == found(index, "nothing here") == {}
    assert set(found(index, " ".join(f"w{i}" for i in range(3000)) + " red")) == {1}


def test_an_index_without_blocks_or_words_finds_nothing() -> None:
    assert found(WordIndex(), "fox") == found(index_of("", " - "), "fox") == {}
    assert set(found(index_of("", "fox", ""), "fox")) == {2}


def test_an_index_forgets_and_forks(index: WordIndex) -> None:
    fork = index.fork()
    index.drop_from(3)
    assert (len(index), index.end) == (2, 3) and set(found(index, "fox")) == {1}
    index.add([terms("another fox")])
    assert set(found(index, "fox ran")) == {1, 3} and len(fork) == 4
    assert found(fork, "another") == {} and set(found(fork, "ran")) == {3}
    np.testing.assert_array_equal(index.terms(3), terms("another fox"))
    assert index.nbytes > 0
    index.drop_from(0)
    assert (len(index), index.end, index.nbytes) == (0, 1, 0)


WORDS = ["a", "the", "key", "parseConfig", "über", "v1.2", "x_y", "東", "fox", "-"]
SAID = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


@given(st.lists(SAID, min_size=1, max_size=20), SAID)
def test_scores_are_those_of_sqlite(texts: list[str], query: str) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        try:
            db.execute(
                "CREATE VIRTUAL TABLE t USING fts5(said, "
                "tokenize = \"unicode61 remove_diacritics 2 tokenchars '_'\")"
            )
        except sqlite3.OperationalError:
            pytest.skip("the SQLite of this Python has no text search")
        rows = [(i + 1, " ".join(words(text))) for i, text in enumerate(texts)]
        db.executemany("INSERT INTO t(rowid, said) VALUES (?, ?)", rows)
        match = " OR ".join(f'"{word}"' for word in dict.fromkeys(words(query)))
        select = "SELECT rowid, -bm25(t) FROM t WHERE t MATCH ? ORDER BY rowid"
        wanted = dict(db.execute(select, (match,))) if match else {}
    got = found(index_of(*texts), query)
    assert list(got) == list(wanted)
    np.testing.assert_allclose(list(got.values()), list(wanted.values()), rtol=1e-9)


# -- the policy


class RetrievalRun(CompactionRun):
    def __init__(self, make: Any = CompactionRetrieval, **options: Any) -> None:
        super().__init__(make, **options)

    def say(self, said: str) -> Any:
        return self.read(VOCAB.tokenize(said))

    def question(self, said: str, n: int = 5) -> Any:
        return self.ask(VOCAB.tokenize(said), n)


def story(n: int, **facts: str) -> str:
    """`n` dull lines; `at_7="..."` puts a text in the place of line 7."""
    lines = [f"Line {i} says that all is calm and well." for i in range(n)]
    for where, fact in facts.items():
        lines[int(where.removeprefix("at_"))] = fact
    return " ".join(lines)


FACT = "The Zanzibar passcode is 4821."
ASKED = "What is the passcode of Zanzibar?"


def told(**options: Any) -> RetrievalRun:
    run = RetrievalRun(**options)
    run.say(story(60, at_7=FACT))
    return run


def selected(result: Any) -> list[Any]:
    return [b for b in result.recalls[0].blocks if b.why == "selected"]


@HOOKS
def test_what_was_replaced_is_found_by_the_words_of_the_question(hooks: bool) -> None:
    run = told(hooks=hooks)
    n, base = run.policy.n_tokens, run.policy.tokens()
    task = run.task(run.policy.step(request(VOCAB.tokenize(ASKED), 5)))
    while not any(isinstance(e, Recalled) for e in run.events):
        run.drive(task, batches=1)
    view = run.policy._view_tokens(n + len(ASKED)).tolist()
    run.drive(task)
    result = task.result(0)
    (report,) = result.recalls
    found = selected(result)
    at = VOCAB.detokenize(base).decode().index(FACT)
    assert {b.start for b in found} >= set(range(at // 8 * 8, at + len(FACT), 8))
    assert {1, 2} <= {b.rank for b in found} and all(b.score > 0 and not b.resident for b in found)
    assert report.n_selected == len(found) and report.n_candidates == run.policy._now.cut // 8 - 1
    assert not report.noop and report.n_view == len(view)
    assert [b.start for b in report.blocks] == sorted(b.start for b in report.blocks)
    for block in report.blocks:
        tokens = run.policy.tokens(block.start, block.start + block.count).tolist()
        assert view[block.position : block.position + block.count] == tokens
        assert VOCAB.detokenize(np.array(tokens)).decode() == block.text
    shown = VOCAB.detokenize(np.array(view)).decode()
    assert FACT in shown and shown.endswith(module.END.replace("\n", "h") + ASKED)


@HOOKS
def test_passages_are_in_the_view_of_one_step_only(hooks: bool) -> None:
    run = told(hooks=hooks)
    base = run.policy.tokens()
    first = run.question(ASKED, 20)
    want = np.concatenate([base, VOCAB.tokenize(ASKED), first.tokens])
    assert np.array_equal(run.policy.tokens(), want)
    assert FACT not in VOCAB.detokenize(run.policy._view_tokens(run.policy.n_tokens)).decode()
    run.say("Go on.")
    run.check_cells()
    second = run.question("Is line 3 calm?", 5)
    assert FACT not in "".join(b.text for b in second.recalls[0].blocks if b.why == "selected")


def test_a_history_that_fits_is_not_searched() -> None:
    run = RetrievalRun()
    run.say(story(5, at_2=FACT))
    assert run.question(ASKED).recalls == () and run.policy.stats().n_blocks == 0


def test_a_question_without_a_known_word_gets_no_passages() -> None:
    run, plain = told(), CompactionRun(Compaction)
    plain.read(run.policy.tokens())
    result = run.question("Qwertz uiop", 30)
    assert result.recalls[0].noop and result.recalls[0].n_selected == 0 and not selected(result)
    if len(plain.policy._compactions) == len(run.policy._compactions):
        assert result.tokens == plain.ask(VOCAB.tokenize("Qwertz uiop"), 30).tokens


def test_passages_keep_to_their_budget_and_neighbours_of_a_find_come_along() -> None:
    run = RetrievalRun()
    run.say(story(200, at_7=FACT))
    result = run.question("Say which line says that all is calm and well, and the passcode.", 5)
    tokens = run.policy._search.passages
    assert len(selected(result)) > 1 and sum(p.n for p in tokens) <= VIEW // 4
    assert result.recalls[0].n_view <= VIEW - VIEW // 8
    only = selected(run.question("4821", 5))
    assert len(only) == 3 and [b.rank for b in only if "4821" in b.text] == [1]
    assert np.diff([b.start for b in only]).tolist() == [BLOCK, BLOCK]


def test_recent_text_and_the_question_come_before_passages() -> None:
    run = told()
    result = run.result(run.policy.step(request(VOCAB.tokenize(ASKED + " " + "x" * 470), 5)))
    assert result.recalls and not selected(result)


def test_words_cut_by_the_edges_of_a_block_are_whole_in_both_blocks() -> None:
    run = RetrievalRun()
    said = story(12, at_7=FACT)
    run.policy._tokens.extend(VOCAB.tokenize(said).tolist())
    texts = [run.policy._text_of(i) for i in range(len(said) // BLOCK)]
    assert {word for block in texts for word in block.split()} == set(said.split())
    assert sum("Zanzibar" in block for block in texts) == 2


def test_passages_stay_while_an_answer_outgrows_the_view() -> None:
    run = told()
    task = run.task(run.policy.step(request(VOCAB.tokenize(ASKED), 1200)))
    before = len(run.policy._compactions)
    while len(run.policy._compactions) < before + 2:
        run.drive(task, batches=10)
        assert not task.done
    run.drive(task, batches=200)
    view = VOCAB.detokenize(run.policy._view_tokens(len(run.policy._tokens))).decode()
    assert FACT in view and view.index(FACT) < view.index(ASKED)
    run.drive(task)
    assert task.result(0).n_generated == 1200 and len(task.result(0).recalls) == 1
    run.say("Go on.")
    run.check_cells()


def test_a_truncated_history_is_searched_as_if_there_had_been_no_more() -> None:
    run = told()
    run.question(ASKED)
    run.say(story(80, at_3="The Atlantis passcode is 7777."))
    assert "Atlantis" in "".join(b.text for b in selected(run.question("Atlantis?")))
    run.policy.truncate(2500)
    run.say(story(40))
    assert not selected(run.question("Atlantis?"))
    assert selected(run.question(ASKED))


def test_what_a_cancelled_step_had_read_is_not_found() -> None:
    run = told()
    run.question(ASKED)
    long = VOCAB.tokenize(story(80, at_3="The Atlantis passcode is 7777.") + " Atlantis?")
    task = run.task(run.policy.step(request(long, 50, query_start=len(long) - 9)))
    while not any(isinstance(e, Recalled) and e.report.blocks[-1].start > 3000 for e in run.events):
        run.drive(task, batches=1)
        assert not task.done
    task.cancel()
    run.drive(task)
    assert isinstance(task.error, Cancelled)
    run.say(story(40))
    assert not selected(run.question("Atlantis?")) and selected(run.question(ASKED))


def test_a_fork_searches_its_own_history() -> None:
    run = told(n_parallel=2)
    run.question(ASKED)
    fork = run.policy.fork()
    run.say(story(80, at_3="The Atlantis passcode is 7777."))
    assert selected(run.question("Atlantis?"))
    other = run.policy
    run.policy = fork
    run.events.clear()
    result = run.result(fork.step(request(VOCAB.tokenize("Atlantis?"), 5)), 1)
    assert not selected(result)
    assert selected(run.result(fork.step(request(VOCAB.tokenize(ASKED), 5)), 1))
    for policy in (other, fork):
        policy.evict()
        policy.close()
    assert run.core.pool.n_used == 0


def test_it_is_found_by_name_and_counts_its_blocks() -> None:
    run = RetrievalRun(lambda core: make_policy("compaction_retrieval", core))
    run.read(text(1500))
    run.ask(text(20, 1))
    stats = run.policy.stats()
    assert stats.policy == "compaction_retrieval" and stats.index_bytes > 0
    assert stats.n_blocks == run.policy._now.cut // BLOCK - SINK // BLOCK
    run.policy.close()

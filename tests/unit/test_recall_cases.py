"""The cases of scripts/bench_recall point at what they say, in texts that are what they were."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "scripts"))

from recall_bench.cases import Case, Cases, ChangedSource, History, Sources, source_folders  # noqa: E402

CASES = Cases.load()
BLOCK_CHARS = 32 * 3  # a block of 32 tokens is seldom longer than this in prose
WORDS = re.compile(r"[\w.+%]*\w")


def sources(data: Path | None = None) -> Sources:
    return Sources(source_folders(REPO, None if data is None else str(data)))


def check(history: History, source: str) -> None:
    text = history.text(source)
    assert 10_000 <= len(text) <= 30_000, "an excerpt of 4K to 7K tokens"
    for case in CASES.of(history.id):
        spans = case.spans(history)
        found = " ".join(text[start:end] for start, end in spans)
        if case.kind == "plain":
            assert found == " ".join(source[start:end] for start, end in case.evidence), case.id
        else:
            assert found == history.insertions[case.insertion].text.rstrip(), case.id
        missing = [word for word in WORDS.findall(case.answer.lower()) if word not in found.lower()]
        assert not missing, f"{case.id}: {missing} of the answer not in the evidence"
        assert all(start > BLOCK_CHARS and end < len(text) - 12 * BLOCK_CHARS for start, end in spans), (
            case.id
        )
    for number, insertion in enumerate(history.insertions):
        assert text.count(insertion.text) == 1
        assert text[slice(*history.span(number))] == insertion.text.rstrip()
        assert source[insertion.at - 1] == "\n", "an insertion begins a line"


def test_there_are_enough_cases_and_most_are_plain_questions():
    kinds = [case.kind for case in CASES.cases]
    assert set(kinds) == {"plain", "lookalike"}
    assert len(kinds) >= 72 and kinds.count("plain") * 2 >= len(kinds)
    from_source = {h.id for h in CASES.histories if h.source.startswith("llama.cpp:")}
    assert sum(case.history in from_source for case in CASES.cases) >= 32


def test_cases_have_names_and_histories_of_their_own():
    names = [case.id for case in CASES.cases]
    assert len(set(names)) == len(names)
    assert {case.history for case in CASES.cases} == {history.id for history in CASES.histories}
    questions = [(case.history, case.question) for case in CASES.cases]
    assert len(set(questions)) == len(questions)


@pytest.mark.parametrize("history", CASES.histories, ids=lambda h: h.id)
def test_offsets_lie_in_the_excerpt_and_do_not_cross(history: History):
    edges = [i.at for i in history.insertions]
    assert edges == sorted(set(edges)) and len(edges) == 4
    assert history.start < edges[0] and edges[-1] < history.end
    for case in CASES.of(history.id):
        if case.kind == "plain":
            assert case.evidence and case.insertion == -1
            for start, end in case.evidence:
                assert history.start <= start < end <= history.end
                assert not any(start < at < end for at in edges), (
                    f"{case.id}: an insertion splits the evidence"
                )
        else:
            assert not case.evidence and 0 <= case.insertion < 4


@pytest.mark.parametrize("history", CASES.histories, ids=lambda h: h.id)
def test_insertions_are_alike_and_only_one_answers(history: History):
    texts = [insertion.text for insertion in history.insertions]
    assert len(set(texts)) == 4 and max(map(len, texts)) - min(map(len, texts)) < 16
    for case in CASES.of(history.id):
        if case.kind == "lookalike":
            assert [case.answer in text for text in texts].index(True) == case.insertion
            assert sum(case.answer in text for text in texts) == 1


@pytest.mark.parametrize(
    "history", [h for h in CASES.histories if h.source.startswith("llama.cpp:")], ids=lambda h: h.id
)
def test_evidence_in_the_fetched_source_holds_the_answer(history: History):
    source = sources().text(history)
    if source is None:
        pytest.skip("the llama.cpp source is not unpacked here")
    check(history, source)


@pytest.mark.parametrize(
    "history", [h for h in CASES.histories if h.source.startswith("data:")], ids=lambda h: h.id
)
def test_evidence_in_the_test_data_holds_the_answer(history: History, data_folder: Path):
    source = sources(data_folder).text(history)
    assert source is not None, f"{history.source} is not in {data_folder}"
    check(history, source)


def test_a_changed_source_is_refused_and_an_absent_one_is_not(tmp_path: Path):
    history = History("h", "data:text.txt", "0" * 64, 0, 4, ())
    assert Sources({"data": [tmp_path]}).text(history) is None
    (tmp_path / "text.txt").write_text("text", encoding="utf-8")
    with pytest.raises(ChangedSource, match="sha256"):
        Sources({"data": [tmp_path]}).text(history)


def test_offsets_count_the_insertions_before_them():
    from recall_bench.cases import Insertion

    source = "one two three four"
    history = History("h", "data:x", "", 4, 18, (Insertion(8, "new "), Insertion(14, "more\n")))
    assert history.text(source) == "two new three more\nfour"
    case = Case("c", "h", "plain", "?", "three", evidence=((8, 13), (14, 18)))
    assert [history.text(source)[a:b] for a, b in case.spans(history)] == ["three", "four"]
    assert history.text(source)[slice(*history.span(1))] == "more"

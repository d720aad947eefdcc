"""The annotated questions: histories, what is asked about them, and where the answers stand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sources import MissingSource, source_sha256, source_text

FOLDER = Path(__file__).with_name("questions")
SETS = ("novel", "agent", "docs", "needles")
FILLER = {
    "docs": ("data:pride_prejudice_mod.txt",),
    "": ("llama.cpp:docs/build.md", "llama.cpp:tools/server/README.md", "llama.cpp:docs/backend/SYCL.md"),
}
"""By set: what stands around its stretches in longer histories. Never what the set itself asks about."""

_GAP = "\n\n"


@dataclass(frozen=True, slots=True)
class Question:
    """Spans are characters start <= i < end of the history's text."""

    id: str
    kind: str  # plain, reworded or needle
    text: str
    answer: str
    evidence: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class History:
    """A text and the questions about it."""

    id: str
    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of a source that questions are asked about."""

    id: str
    source: str  # its name
    start: int
    end: int
    insertions: tuple[tuple[int, str], ...]  # (where in the source, text), ascending
    questions: tuple[dict[str, Any], ...]


def histories(name: str, together: int = 1, n_chars: int = 0) -> Iterator[History]:
    """Those of one set: so many of its stretches each (0: all), in between as many characters of other texts
    as it takes to reach `n_chars`, half of them before the stretches and half after.

    Raises MissingSource if a text is not here or is another one.
    """
    stretches, texts = _load(name)
    filler = ""
    for i in range(0, len(stretches), together or len(stretches)):
        some = stretches[i : i + (together or len(stretches))]
        if n_chars and not filler:
            filler = _GAP.join(source_text(source) for source in FILLER.get(name, FILLER[""]))
        yield _history(some, texts, n_chars, filler)


def _load(name: str) -> tuple[list[_Stretch], dict[str, str]]:
    """The stretches of a set, and the texts of its sources by name."""
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    stretches, texts = [], {}
    for part in content if isinstance(content, list) else [content]:
        source = part["source"]
        texts[source] = source_text(source)
        if source_sha256(texts[source]) != part["sha256"]:
            raise MissingSource(f"{source}: it is not the text that the questions are about")
        copies = part.get("copies", {})
        for stretch in part["stretches"]:
            questions = [
                q | {"copies": copies.get(q["id"], [])}
                for q in part["questions"]
                if q["stretch"] == stretch["id"]
            ]
            inserted = tuple((one["at"], one["text"]) for one in stretch.get("insertions", ()))
            stretches.append(
                _Stretch(stretch["id"], source, stretch["start"], stretch["end"], inserted, tuple(questions))
            )
    return stretches, texts


def _history(some: Sequence[_Stretch], texts: dict[str, str], n_chars: int, filler: str) -> History:
    pieces: list[str] = []
    n = 0  # characters so far
    runs: list[tuple[str, int, int, int]] = []  # (source, start, end there, where it starts here)
    places: dict[tuple[str, int], tuple[int, int]] = {}  # of an insertion: (stretch, number of it)

    def add(text: str) -> None:
        nonlocal n
        pieces.append(text)
        n += len(text)

    spans = _merged(some)
    n_own = sum(end - start for _, start, end in spans)
    n_own += sum(len(text) for stretch in some for _, text in stretch.insertions)
    n_around = min(max(n_chars - n_own, 0) // 2, len(filler) // 2)
    if n_around:
        add(filler[:n_around] + _GAP)
    for source, start, end in spans:
        at = start
        inserted = [
            (where, stretch.id, i, text)
            for stretch in some
            if stretch.source == source
            for i, (where, text) in enumerate(stretch.insertions)
            if start <= where <= end
        ]
        for where, stretch_id, i, text in sorted(inserted):
            runs.append((source, at, where, n))
            add(texts[source][at:where])
            places[stretch_id, i] = (n, n + len(text))
            add(text)
            at = where
        runs.append((source, at, end, n))
        add(texts[source][at:end] + _GAP)
    if n_around:
        add(filler[n_around : 2 * n_around])

    def here(source: str, a: int, b: int) -> Iterator[tuple[int, int]]:
        for name, start, end, at in runs:
            if name == source and max(a, start) < min(b, end):
                yield at + max(a, start) - start, at + min(b, end) - start

    questions = []
    for stretch in some:
        for q in stretch.questions:
            if q["kind"] == "needle":
                evidence = (places[stretch.id, q["evidence"]],)
            else:
                evidence = tuple(
                    span for a, b in [*q["evidence"], *q["copies"]] for span in here(stretch.source, a, b)
                )
            questions.append(Question(q["id"], q["kind"], q["question"], q["answer"], evidence))
    return History("+".join(stretch.id for stretch in some), "".join(pieces), tuple(questions))


def _merged(some: Sequence[_Stretch]) -> list[tuple[str, int, int]]:
    """(source, start, end) of what the stretches cover, in their order; those that overlap are one."""
    out: list[tuple[str, int, int]] = []
    for stretch in some:
        if out and out[-1][0] == stretch.source and stretch.start <= out[-1][2]:
            out[-1] = (stretch.source, out[-1][1], max(out[-1][2], stretch.end))
        else:
            out.append((stretch.source, stretch.start, stretch.end))
    return out

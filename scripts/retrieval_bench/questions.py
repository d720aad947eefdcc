"""The annotated questions: histories, what is asked about them, and where the answers stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sources import MissingSource, source_sha256, source_text

FOLDER = Path(__file__).with_name("questions")
SETS = ("novel", "agent", "docs", "needles")


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


def histories(name: str, n_chars: int = 0) -> Iterator[History]:
    """Those of one set. n_chars: so much of the source around each stretch; 0: the stretch alone.

    Raises MissingSource if a text is not here or is another one.
    """
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    for part in content if isinstance(content, list) else [content]:
        source = source_text(part["source"])
        if source_sha256(source) != part["sha256"]:
            raise MissingSource(f"{part['source']}: it is not the text that the questions are about")
        for stretch in part["stretches"]:
            yield _history(part, stretch, source, n_chars)


def _history(part: dict[str, Any], stretch: dict[str, Any], source: str, n_chars: int) -> History:
    more = max(n_chars - (stretch["end"] - stretch["start"]), 0)
    start = max(
        min(stretch["start"] - more // 2, len(source) - (stretch["end"] - stretch["start"]) - more), 0
    )
    end = min(max(stretch["end"] + more - (stretch["start"] - start), stretch["end"]), len(source))
    insertions = stretch.get("insertions", [])
    pieces, at, inserted = [], start, []
    n = 0
    for insertion in insertions:
        pieces += [source[at : insertion["at"]], insertion["text"]]
        n += insertion["at"] - at
        inserted.append((n, n + len(insertion["text"])))
        n, at = n + len(insertion["text"]), insertion["at"]
    pieces.append(source[at:end])

    def spans(question: dict[str, Any]) -> tuple[tuple[int, int], ...]:
        if question["kind"] == "needle":
            return (inserted[question["evidence"]],)
        found = [*question["evidence"], *part.get("copies", {}).get(question["id"], [])]
        return tuple((a - start, b - start) for a, b in found if start <= a and b <= end)

    questions = tuple(
        Question(q["id"], q["kind"], q["question"], q["answer"], spans(q))
        for q in part["questions"]
        if q["stretch"] == stretch["id"]
    )
    return History(stretch["id"], "".join(pieces), questions)

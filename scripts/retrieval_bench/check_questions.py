#!/usr/bin/env python3
"""Are the question files right? Checksums, offsets, sizes, places of the evidence, and the reworded rule.

    scripts/retrieval_bench/check_questions.py                  every file of questions/
    scripts/retrieval_bench/check_questions.py FILE... --show   also prints every question with its evidence

One line per fault; exit status 1 if there is any, or if a source is not here.

A stretch may have "insertions", look-alike facts: [{"at": character of the source, "text": ...}, ...]. A
needle asks for one of them: its evidence is the number of the insertion, from 0. A file may have "copies":
for the id of a question, ranges outside its stretch that state the answer again; they matter to histories
that hold them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from retrieval_bench.sources import MissingSource, source_sha256, source_text  # noqa: E402
from retrieval_bench.stems import content_stems  # noqa: E402

FIELDS = {"id", "stretch", "kind", "question", "answer", "evidence"}
KINDS = ("plain", "reworded", "needle")
STRETCH = (22_000, 30_000)  # characters, smallest and largest
N_HEAD, N_TAIL = 600, 3_000  # characters of a stretch that are always in the view (sink and recent)
MAX_EVIDENCE = 600  # characters of one question's ranges together
MAX_ANSWER = 200  # characters
N_PARTS = 4  # each part of a stretch has evidence

Row = dict[str, Any]


def faults_of(content: Row, text: str) -> Iterator[str]:
    """What is wrong in one question file. text: of its source."""
    found = source_sha256(text)
    if content["sha256"] != found:
        yield f"sha256: {content['source']} has {found}; the offsets are of another text"
        return
    stretches: dict[str, Row] = {}
    for stretch in content["stretches"]:
        name, start, end = stretch["id"], stretch["start"], stretch["end"]
        if name in stretches:
            yield f"{name}: two stretches have this id"
        if not 0 <= start < end <= len(text):
            yield f"{name}: {start}..{end} is not inside the source, 0..{len(text)}"
        elif not STRETCH[0] <= end - start <= STRETCH[1]:
            yield f"{name}: {end - start} characters; allowed are {STRETCH[0]} to {STRETCH[1]}"
        stretches[name] = stretch
    for one, two in pairwise(sorted(stretches.values(), key=lambda stretch: int(stretch["start"]))):
        # Ends that have no evidence may be shared; so may texts that are only there to hide insertions.
        if two["start"] + N_HEAD < one["end"] - N_TAIL and not one.get("insertions"):
            yield f"{two['id']}: overlaps {one['id']}"
    for question in content["questions"]:
        yield from (f"{question.get('id')}: {fault}" for fault in _question_faults(question, stretches, text))
    for name, stretch in stretches.items():
        own = [q for q in content["questions"] if q["stretch"] == name]
        if "insertions" in stretch:
            yield from (f"{name}: {fault}" for fault in _insertion_faults(stretch, text))
        else:
            yield from (f"{name}: {fault}" for fault in _place_faults(stretch, own))
    yield from _copy_faults(content, stretches, text)


def _question_faults(question: Row, stretches: dict[str, Row], text: str) -> Iterator[str]:
    if set(question) != FIELDS:
        yield f"fields {sorted(question)}, not {sorted(FIELDS)}"
        return
    if question["kind"] not in KINDS:
        yield f"kind {question['kind']!r} is none of {', '.join(KINDS)}"
    for field in ("question", "answer"):
        line = question[field]
        if not line or line != line.strip() or "\n" in line:
            yield f"the {field} is not one line without spaces around it"
    if len(question["answer"]) > MAX_ANSWER:
        yield f"the answer has {len(question['answer'])} characters, at most {MAX_ANSWER}"
    if question["stretch"] not in stretches:
        yield f"there is no stretch {question['stretch']!r}"
        return
    if not question["id"].startswith(question["stretch"] + "-"):
        yield f"the id does not begin with its stretch, {question['stretch']}-"
    if question["kind"] == "needle":
        yield from _needle_faults(question, stretches[question["stretch"]], text)
        return
    yield from _evidence_faults(question["evidence"], stretches[question["stretch"]], text)
    if question["kind"] == "reworded":
        evidence = content_stems(" ".join(text[start:end] for start, end in question["evidence"]))
        words = content_stems(question["question"])
        if shared := sorted(f"{words[stem]}/{evidence[stem]}" for stem in words.keys() & evidence.keys()):
            yield f"reworded, but shares words with its evidence: {', '.join(shared)}"


def _evidence_faults(evidence: list[list[int]], stretch: Row, text: str) -> Iterator[str]:
    if not evidence:
        yield "no evidence"
    low, high = stretch["start"] + N_HEAD, stretch["end"] - N_TAIL
    for start, end in evidence:
        if not low <= start < end <= high:
            yield f"evidence {start}..{end} is not inside {low}..{high} of its stretch"
        elif (piece := text[start:end]) != piece.strip():
            yield f"evidence {start}..{end} begins or ends with white space"
        elif text[start - 1 : start + 1].isalnum() or text[end - 1 : end + 1].isalnum():
            yield f"evidence {start}..{end} begins or ends inside a word"
    for (_, before), (after, _) in pairwise(evidence):
        if after < before:
            yield "ranges of evidence are not in order, or overlap"
    if (total := sum(end - start for start, end in evidence)) > MAX_EVIDENCE:
        yield f"{total} characters of evidence, at most {MAX_EVIDENCE}"


def _needle_faults(question: Row, stretch: Row, text: str) -> Iterator[str]:
    insertions, number = stretch.get("insertions", []), question["evidence"]
    if not isinstance(number, int) or not 0 <= number < len(insertions):
        yield f"evidence {number!r} is not the number of one of {len(insertions)} insertions"
        return
    holders = [n for n, insertion in enumerate(insertions) if question["answer"] in insertion["text"]]
    if holders != [number]:
        yield f"the answer stands in insertions {holders}, not only in {number}"
    if question["answer"] in text:
        yield "the answer stands in the source too"


def _insertion_faults(stretch: Row, text: str) -> Iterator[str]:
    low, high = stretch["start"] + N_HEAD, stretch["end"] - N_TAIL
    places = [insertion["at"] for insertion in stretch["insertions"]]
    if places != sorted(set(places)):
        yield "insertions are not in order"
    for insertion in stretch["insertions"]:
        at = insertion["at"]
        if not low <= at <= high:
            yield f"insertion at {at} is not inside {low}..{high}"
        elif text[at - 1] != "\n" or not insertion["text"].endswith("\n"):
            yield f"insertion at {at} does not stand on lines of its own"
        if len(insertion["text"]) > MAX_EVIDENCE:
            yield f"insertion at {at} has {len(insertion['text'])} characters, at most {MAX_EVIDENCE}"


def _copy_faults(content: Row, stretches: dict[str, Row], text: str) -> Iterator[str]:
    own = {question["id"]: stretches.get(question["stretch"]) for question in content["questions"]}
    for name, ranges in content.get("copies", {}).items():
        if (stretch := own.get(name)) is None:
            yield f"copies: there is no question {name!r} with a stretch"
            continue
        for start, end in ranges:
            if not 0 <= start < end <= len(text) or (start < stretch["end"] and stretch["start"] < end):
                yield f"{name}: copy {start}..{end} is not inside the source and outside {stretch['id']}"


def _place_faults(stretch: Row, questions: list[Row]) -> Iterator[str]:
    ranges = sorted((start, end, q["id"]) for q in questions for start, end in q["evidence"])
    for (_, before, one), (after, _, two) in pairwise(ranges):
        if after < before and one != two:
            yield f"{one} and {two} have evidence in the same place"
    low, high = stretch["start"] + N_HEAD, stretch["end"] - N_TAIL
    for part in range(N_PARTS):
        start = low + (high - low) * part // N_PARTS
        end = low + (high - low) * (part + 1) // N_PARTS
        if not any(start <= at < end for at, _, _ in ranges):
            yield f"no evidence in {start}..{end}; spread the questions"


def repeated(files: dict[str, Row]) -> Iterator[str]:
    """Ids and questions that are there twice, in one file or in two."""
    seen: dict[str, str] = {}
    for name, content in files.items():
        for question in content["questions"]:
            for key in (question["id"], question["question"]):
                if key in seen:
                    yield f"{name}: {key!r} is in {seen[key]} already"
                seen[key] = name


def objects(path: Path) -> Iterator[tuple[str, Row]]:
    """The objects of a question file with their names: it holds one, or a list with one for each source."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, list):
        yield path.name, content
        return
    for number, part in enumerate(content):
        yield f"{path.name}[{number}]", part


def summary(content: Row) -> str:
    counts = {kind: sum(q["kind"] == kind for q in content["questions"]) for kind in KINDS}
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
    return f"{len(content['stretches'])} stretches, {len(content['questions'])} questions ({kinds})"


def show(content: Row, text: str) -> None:
    for question in content["questions"]:
        print(f"{question['id']} [{question['kind']}] {question['question']}\n  = {question['answer']}")
        if isinstance(number := question["evidence"], int):
            stretch = next(s for s in content["stretches"] if s["id"] == question["stretch"])
            print(f"  insertion {number}: {' '.join(stretch['insertions'][number]['text'].split())}")
            continue
        for start, end in question["evidence"]:
            print(f"  {start}..{end}: {' '.join(text[start:end].split())}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: all of questions/")
    parser.add_argument("--show", action="store_true", help="print every question with its evidence")
    args = parser.parse_args()

    paths = args.files or sorted((HERE / "questions").glob("*.json"))
    contents = {name: content for path in paths for name, content in objects(path)}
    faults = list(repeated(contents))
    for name, content in contents.items():
        try:
            text = source_text(content["source"])
        except MissingSource as error:
            faults.append(f"{name}: {error}")
            continue
        if args.show:
            show(content, text)
        faults += [f"{name}: {fault}" for fault in faults_of(content, text)]
        print(f"{name}: {summary(content)}")
    for fault in faults:
        print(fault)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()

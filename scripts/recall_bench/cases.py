"""The cases: questions about excerpts of real texts, and where in them the answer stands.

cases.json holds offsets and checksums, never the texts: those are documents of the fetched llama.cpp source,
and files of the folder KVMEM_TEST_DATA. All offsets are characters of the source's text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).with_name("cases.json")


@dataclass(frozen=True, slots=True)
class Insertion:
    """A fact that is not in the source, put into the excerpt before character `at`."""

    at: int
    text: str


@dataclass(frozen=True, slots=True)
class History:
    """A contiguous excerpt of one source, with insertions; several cases ask about it."""

    id: str
    source: str  # "llama.cpp:path" or "data:file"
    sha256: str  # of the source's text in UTF-8
    start: int
    end: int
    insertions: tuple[Insertion, ...]  # ascending

    def text(self, source: str) -> str:
        """The excerpt with its insertions. source: the whole text of the source."""
        parts, at = [], self.start
        for insertion in self.insertions:
            parts += [source[at : insertion.at], insertion.text]
            at = insertion.at
        return "".join([*parts, source[at : self.end]])

    def offset(self, at: int) -> int:
        """Where character `at` of the source stands in the excerpt."""
        return at - self.start + sum(len(i.text) for i in self.insertions if i.at <= at)

    def span(self, number: int) -> tuple[int, int]:
        """Characters start <= i < end of an insertion in the excerpt, without the white space after it."""
        before = self.insertions[:number]
        start = self.insertions[number].at - self.start + sum(len(i.text) for i in before)
        return start, start + len(self.insertions[number].text.rstrip())


@dataclass(frozen=True, slots=True)
class Case:
    """One question. kind: "plain", about the text itself; "lookalike", about one of its insertions."""

    id: str
    history: str
    kind: str
    question: str
    answer: str  # short; its words stand in the evidence
    evidence: tuple[tuple[int, int], ...] = ()  # of a plain case: characters start <= i < end of the source
    insertion: int = -1  # of a lookalike case: which one answers it

    def spans(self, history: History) -> list[tuple[int, int]]:
        """The evidence, as characters of the excerpt."""
        if self.kind == "lookalike":
            return [history.span(self.insertion)]
        return [(history.offset(start), history.offset(end - 1) + 1) for start, end in self.evidence]


@dataclass(frozen=True, slots=True)
class Cases:
    histories: tuple[History, ...]
    cases: tuple[Case, ...]

    @classmethod
    def load(cls, file: Path = FILE) -> Cases:
        content = json.loads(file.read_text(encoding="utf-8"))
        histories = tuple(
            History(**(row | {"insertions": tuple(Insertion(**i) for i in row["insertions"])}))
            for row in content["histories"]
        )
        cases = tuple(
            Case(**(row | {"evidence": tuple((a, b) for a, b in row.get("evidence", ()))}))
            for row in content["cases"]
        )
        return cls(histories, cases)

    def of(self, history: str) -> list[Case]:
        return [case for case in self.cases if case.history == history]


class ChangedSource(Exception):
    """A source is there, but it is not the text that the offsets were taken from."""


@dataclass(slots=True)
class Sources:
    """Where texts are looked for: folders by the word before the colon."""

    folders: Mapping[str, Sequence[Path]]
    _texts: dict[str, str] = field(default_factory=dict)

    def text(self, history: History) -> str | None:
        """The whole text of the history's source; None if it is not there. Raises ChangedSource."""
        if history.source not in self._texts:
            kind, _, name = history.source.partition(":")
            files = [folder / name for folder in self.folders.get(kind, ()) if (folder / name).is_file()]
            if not files:
                return None
            self._texts[history.source] = read_source(files[0])
        text = self._texts[history.source]
        found = hashlib.sha256(text.encode()).hexdigest()
        if found != history.sha256:
            raise ChangedSource(f"{history.source}: sha256 {found}, the cases were made for {history.sha256}")
        return text


def read_source(file: Path) -> str:
    """A text file as it is; of a chat-completions body the contents of its messages."""
    text = file.read_bytes().decode("utf-8")  # line ends as they are: offsets count them
    if file.suffix != ".json":
        return text
    messages = json.loads(text)["messages"]
    return "\n\n".join(message["content"] for message in messages if message.get("content"))


def source_folders(repository: Path, data: str | None, tree: str | None = None) -> dict[str, list[Path]]:
    """Folders for Sources.

    data: the test data; None: there is none. tree: an unpacked llama.cpp; None: the one that the build made.
    """
    built = repository / "vendor" / "build"
    trees = [Path(tree)] if tree else [built / "stock" / "llama.cpp", built / "patched" / "llama.cpp"]
    return {"llama.cpp": trees, "data": [Path(data)] if data else []}

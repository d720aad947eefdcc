"""Heat against least-recently-used, on the order in which real questions recalled blocks of real texts.

The recording is made once with the engine (questions of scripts/recall_bench over texts of KVMEM_TEST_DATA)
and kept in a file; then it is replayed through the host pool of the store with three budgets.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from recall_bench.cases import Cases, History, Sources

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.settings import Settings
from kvmem_llama.store.disk import DiskStore
from kvmem_llama.store.heat import Heat, LeastRecentlyUsed, Policy
from kvmem_llama.store.pool import HostPool
from kvmem_llama.store.records import Record, RecordRef
from kvmem_llama.store.segment import SegmentFormat
from kvmem_llama.store.tiered import TieredStore
from kvmem_llama.workspace import open_engine

ANSWER = 8  # tokens
RUN = 3  # questions about one text before another text has its turn
BUDGETS = (0.10, 0.25, 0.50)  # of the records
FORMAT = SegmentFormat("benchmark", "replay", 1, 1024, 1, 1024)  # what matters is which ones, not how large


@dataclass(frozen=True, slots=True)
class Recording:
    """A history that was read, and the blocks that each question then recalled."""

    texts: list[str]
    n_tokens: int  # read
    n_view: int
    block: int
    questions: list[str]
    n_blocks: list[int]  # complete blocks there were, by question
    recalled: list[list[int]]  # numbers of the blocks selected, by question, in the order of the recall


def record(
    model: str, settings: Settings, sources: Sources, n_tokens: int, n_questions: int
) -> Recording | None:
    """Reads about `n_tokens` tokens of the texts that are here, then asks -> None if there is no text."""
    cases = Cases.load()
    here = [history for history in cases.histories if history.source.startswith("data:")]
    texts = [(history, text) for history in here if (text := _text(history, sources))]
    if not texts:
        return None
    with open_engine(Path(model), settings) as engine, engine.workspace() as ws:
        used = []
        began = time.monotonic()
        for history, text in texts:
            if ws.n_tokens < n_tokens:
                ws.read(text, history.id).result()
                used.append(history.id)
        n_read, block = ws.n_tokens, settings.block_size
        print(f"{n_read} tokens read in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        questions = in_runs([[case.question for case in cases.of(id)] for id in used])
        questions = (questions * (1 + n_questions // max(len(questions), 1)))[:n_questions]
        n_blocks, recalled = [], []
        for i, text in enumerate(questions):
            n_blocks.append(ws.n_tokens // block)
            result = ws.ask(text, sampling=SamplingParams(temp=0), max_tokens=ANSWER).result()
            for report in result.recalls:
                chosen = [b for b in report.blocks if b.why == "selected" and b.rank is not None]
                recalled.append([b.start // block for b in chosen])
            print(f"\rquestion {i + 1}/{len(questions)}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    return Recording(used, n_read, settings.n_ctx, block, questions, n_blocks, recalled)


def in_runs(groups: Sequence[Sequence[str]], run: int = RUN) -> list[str]:
    """The questions of all groups, `run` of one group at a time."""
    left = [list(group) for group in groups]
    out: list[str] = []
    while any(left):
        for group in left:
            out += group[:run]
            del group[:run]
    return out


def cached(path: Path, key: str, make: Callable[[], Recording | None]) -> Recording | None:
    """The recording in the file if it was made for `key`; else a new one, kept there."""
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] == key:
            return Recording(**content["recording"])
    recording = make()
    if recording is not None:
        path.write_text(json.dumps({"key": key, "recording": asdict(recording)}) + "\n", encoding="utf-8")
    return recording


def key_of(settings: Settings, n_tokens: int, n_questions: int) -> str:
    """What a recording depends on."""
    facts = [settings.n_ctx, settings.block_size, n_tokens, n_questions, ANSWER, RUN]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


# -- replay


@dataclass(frozen=True, slots=True)
class Replay:
    """What one policy cost with one budget."""

    policy: str
    n_host: int  # records that fit
    n_hits: int
    n_reads: int  # from disk


def replay(folder: Path, recording: Recording, policy: Policy, share: float) -> Replay:
    """The recording over a store whose host budget is `share` of the records it has in the end. Every record
    that is handed out is compared with what was written."""
    n_all = max(max(recording.n_blocks), 1 + max((max(r) for r in recording.recalled if r), default=0))
    n_host = max(round(share * n_all), 2)
    folder.mkdir(parents=True)
    pool = HostPool(n_host * FORMAT.record_nbytes, policy)
    store = TieredStore(pool, DiskStore(folder, FORMAT))
    refs: list[RecordRef] = []
    try:
        for n_blocks, numbers in zip(recording.n_blocks, recording.recalled, strict=True):
            while len(refs) < max([n_blocks, *(n + 1 for n in numbers)]):  # read or answered since
                refs.append(store.put(_record(len(refs))))
            store.flush()
            chosen = [refs[number] for number in numbers]
            store.retrieved(chosen)
            for number, found in zip(numbers, store.get_many(chosen), strict=True):
                assert np.array_equal(found, _record(number)), f"block {number} is another one"
        tiers = store.tiers()
    finally:
        store.close()
    return Replay(policy.name, n_host, tiers.n_hits, tiers.n_reads)


def bench(folder: Path, recording: Recording, budgets: Sequence[float] = BUDGETS) -> list[str]:
    """Lines of the report."""
    n_wanted = sum(map(len, recording.recalled))
    n_distinct = len({number for numbers in recording.recalled for number in numbers})
    lines = [
        f"  {len(recording.questions)} questions about {', '.join(recording.texts)}: "
        f"{recording.n_tokens} tokens, view {recording.n_view}",
        f"  {n_wanted} blocks recalled, {n_distinct} different ones of {max(recording.n_blocks)}",
    ]
    for share in budgets:
        found = [
            replay(folder / f"{policy.name}-{share}", recording, policy, share)
            for policy in (Heat(), LeastRecentlyUsed())
        ]
        heat, lru = found
        said = ", ".join(f"{r.policy} {r.n_reads} disk reads, {r.n_hits / n_wanted:.1%} hits" for r in found)
        verdict = "fewer" if heat.n_reads < lru.n_reads else "as many" if heat == lru else "not fewer: a loss"
        if heat.n_reads == lru.n_reads:
            verdict = "as many"
        lines.append(
            f"  {share:.0%} of the records in the host ({heat.n_host}): {said}; heat / lru "
            f"{heat.n_reads / max(lru.n_reads, 1):.3f}, {verdict}"
        )
    return lines


# -- does the policy change what is recalled?


def selection(
    model: str, settings: Settings, folder: Path, recording: Recording, sources: Sources, n_questions: int
) -> list[str]:
    """Asks the first questions over a durable workspace under both policies, with a host budget of a tenth of
    the records -> lines of the report. Raises AssertionError if a block selected differs."""
    by_id = {history.id: history for history in Cases.load().histories}
    settings = replace(settings, data_dir=str(folder))
    with open_engine(Path(model), settings) as engine, engine.workspace("heat") as ws:
        for id in recording.texts:
            ws.read(_text(by_id[id], sources) or "", id).result()
        ws.fork("lru").close()
        stats = ws.stats()
        n_records = stats.n_records
        nbytes = stats.store_bytes // max(stats.tiers.n_host, 1) if stats.tiers else 0
    reads, answers = {}, {}
    for policy in (Heat(), LeastRecentlyUsed()):
        with open_engine(Path(model), replace(settings, host_budget=n_records * nbytes // 10)) as engine:
            engine.shelf._sharing().pool.policy = policy  # no option: LRU is only compared with
            with engine.workspace(policy.name) as ws:
                found = []
                for question in recording.questions[:n_questions]:
                    result = ws.ask(question, sampling=SamplingParams(temp=0), max_tokens=ANSWER).result()
                    found.append([[(b.start, b.rank, b.why) for b in r.blocks] for r in result.recalls])
                tiers = ws.stats().tiers
                assert tiers is not None
                reads[policy.name], answers[policy.name] = tiers.n_reads, found
    assert answers["heat"] == answers["lru"], "the policy changed the selection"
    return [
        f"  selected blocks of {n_questions} questions are equal under both policies "
        f"(engine, a tenth of the records in the host)"
    ]


def _text(history: History, sources: Sources) -> str | None:
    source = sources.text(history)
    return None if source is None else history.text(source)


def _record(number: int) -> Record:
    return np.random.default_rng(number).integers(0, 256, FORMAT.record_nbytes, np.uint8)

"""What /metrics tells: llama-server's names, and those of memory."""

from __future__ import annotations

import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..memory.report import RecallReport, StepResult, Tier
from ..policies import MemoryStats

CONTENT_TYPE: Final = "text/plain; version=0.0.4"
_RECALL_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_COUNTED: Final = {
    "stage_out_waits": "Commits and reads that waited for records to be written",
    "integrity_failures": "Records that were not as they had been written",
}
TIERS: Final[tuple[Tier, ...]] = ("device", "host", "disk", "tokens")


@dataclass(slots=True)
class _Rate:
    """Tokens and the seconds they took."""

    n: int = 0
    steps: int = 0
    seconds: float = 0.0

    def add(self, n: int, steps: int, seconds: float) -> None:
        self.n += n
        self.steps += steps
        self.seconds += seconds

    @property
    def per_second(self) -> float:
        return self.steps / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Bytes that the open workspaces take."""

    tiers: Mapping[str, int]  # of records, by tier
    index: int  # in RAM


class Metrics:
    """Counts of one server. Any thread."""

    def __init__(self) -> None:
        self.started: Final = int(time.time())  # seconds since 1970
        self._lock: Final = threading.Lock()
        self._prompt, self._predicted = _Rate(), _Rate()
        self._prompt_bucket, self._predicted_bucket = _Rate(), _Rate()  # since the last scrape
        self._n_cached = 0
        self._n_decode = 0
        self._n_tokens_max = 0
        self._n_busy = 0
        self.load: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Requests that are processed, and that wait."""
        self.sizes: Callable[[], MemorySizes] = lambda: MemorySizes({}, 0)
        """Of all workspaces that are open."""
        self.stats: Callable[[], Sequence[tuple[str, MemoryStats]]] = lambda: ()
        """Of the durable ones that are open, with their names."""
        self._registry: Final = CollectorRegistry(auto_describe=False)
        self._recall: Final = Histogram(
            "kvmem:recall_seconds",
            "Seconds that a recall took, replay included",
            buckets=_RECALL_SECONDS,
            registry=self._registry,
        )
        self._selected = self._by_tier("selected", "Blocks that recalls selected, by the tier they were in")
        self._retained = self._counter("blocks_retained", "Selected blocks whose rows were in cells already")
        self._in = self._by_tier("in", "Blocks brought into cells, by the tier they came from")
        self._out = self._counter("blocks_out", "Blocks whose cells were freed or hidden by a recall")
        self._restored = self._counter("restore_bytes", "Bytes of records written into cells")
        self._replayed = self._counter("replay_tokens", "Tokens of queries that were evaluated again")
        self._registry.register(_OfWorkspaces(lambda: self.sizes(), lambda: self.stats()))

    # -- what happens

    def decoded(self, n_busy: int) -> None:
        """One call of llama_decode, with tokens of this many sequences."""
        with self._lock:
            self._n_decode += 1
            self._n_busy += n_busy

    def prompt(self, n_evaluated: int, n_cached: int, seconds: float) -> None:
        """A prompt was evaluated; tokens."""
        with self._lock:
            self._prompt.add(n_evaluated, n_evaluated, seconds)
            self._prompt_bucket.add(n_evaluated, n_evaluated, seconds)
            self._n_cached += n_cached

    def predicted(self, n: int, seconds: float) -> None:
        """An answer of `n` tokens is complete; the first one costs no step of decoding."""
        with self._lock:
            self._predicted.add(n, max(n - 1, 0), seconds)
            self._predicted_bucket.add(n, max(n - 1, 0), seconds)

    def history(self, n_tokens: int) -> None:
        """A history was this long."""
        with self._lock:
            self._n_tokens_max = max(self._n_tokens_max, n_tokens)

    def recalled(self, report: RecallReport, record_bytes: int = 0, n_replayed: int = 0) -> None:
        """A recall. record_bytes: of one block; n_replayed: tokens."""
        self._recall.observe(report.timings.total_s)
        n_in = 0
        for block in report.blocks:
            if block.why == "selected":
                self._selected.labels(block.tier).inc()
                if block.resident:
                    self._retained.inc()
            if not block.resident and block.why != "query":
                self._in.labels(block.tier).inc()
                n_in += 1
        self._restored.inc(n_in * record_bytes)
        if not report.noop:
            self._replayed.inc(n_replayed)

    def blocks_out(self, n: int) -> None:
        """Blocks left their cells."""
        self._out.inc(n)

    def finished(self, result: StepResult, prompt_s: float, predicted_s: float) -> None:
        """A step has ended. Seconds that its prompt and its answer took."""
        self.prompt(result.n_evaluated, result.n_prompt - result.n_evaluated, prompt_s)
        self.predicted(result.n_generated, predicted_s)
        self.history(result.n_prompt + result.n_generated)

    # -- what is told

    def text(self) -> bytes:
        """The page, in Prometheus' text format. The averages are those since the last call."""
        n_processing, n_deferred = self.load()
        with self._lock:
            page = _llamacpp("counter", self._counts()) + _llamacpp(
                "gauge", self._gauges(n_processing, n_deferred)
            )
            self._prompt_bucket, self._predicted_bucket = _Rate(), _Rate()
        lines = generate_latest(self._registry).decode().splitlines(keepends=True)
        own = "".join(line for line in lines if "_created" not in line)  # when a counter was made
        return (page + own).encode()

    def _counts(self) -> list[tuple[str, str, float]]:
        return [
            ("prompt_tokens_total", "Tokens of prompts that were evaluated", self._prompt.n),
            ("prompt_tokens_cached_total", "Tokens of prompts that were stored already", self._n_cached),
            ("prompt_seconds_total", "Seconds of evaluating prompts", self._prompt.seconds),
            ("tokens_predicted_total", "Tokens of answers", self._predicted.n),
            ("tokens_predicted_seconds_total", "Seconds of generating answers", self._predicted.seconds),
            ("n_decode_total", "Calls of llama_decode", self._n_decode),
            ("n_tokens_max", "Longest history so far, tokens", self._n_tokens_max),
            ("spec_decode_num_draft_tokens_total", "Speculation: draft tokens", 0),
            ("spec_decode_num_accepted_tokens_total", "Speculation: draft tokens that were accepted", 0),
            ("spec_decode_num_drafts_total", "Speculation: drafts", 0),
        ]

    def _gauges(self, n_processing: int, n_deferred: int) -> list[tuple[str, str, float]]:
        return [
            ("prompt_tokens_seconds", "Tokens of prompts per second", self._prompt_bucket.per_second),
            ("predicted_tokens_seconds", "Tokens of answers per second", self._predicted_bucket.per_second),
            ("requests_processing", "Requests that are processed", n_processing),
            ("requests_deferred", "Requests that wait for a slot", n_deferred),
            (
                "n_busy_slots_per_decode",
                "Average number of busy slots in a call of llama_decode",
                self._n_busy / max(self._n_decode, 1),
            ),
        ]

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"kvmem:{name}", help, registry=self._registry)

    def _by_tier(self, name: str, help: str) -> Counter:
        counter = Counter(f"kvmem:blocks_{name}", help, ("tier",), registry=self._registry)
        for tier in TIERS:
            counter.labels(tier)
        return counter


class _OfWorkspaces(Collector):
    """What the stores of the open workspaces count. A count goes on where one of them is opened again."""

    def __init__(
        self, sizes: Callable[[], MemorySizes], stats: Callable[[], Sequence[tuple[str, MemoryStats]]]
    ) -> None:
        self._sizes: Final = sizes
        self._stats: Final = stats
        self._lock: Final = threading.Lock()
        self._last: Final[dict[str, dict[str, int]]] = {}  # counts by workspace, as they were seen last
        self._ended: Final[Counts[str]] = Counts()  # of workspaces that were closed since

    def collect(self) -> Iterable[Metric]:
        sizes = self._sizes()
        tiers = GaugeMetricFamily("kvmem:tier_bytes", "Bytes of records on each tier", labels=("tier",))
        for tier, n in sizes.tiers.items():
            tiers.add_metric((tier,), n)
        yield tiers
        yield GaugeMetricFamily("kvmem:index_bytes", "Bytes of indexes in RAM", value=sizes.index)
        counts = self._counts(self._stats())
        for name, help in _COUNTED.items():
            yield CounterMetricFamily(f"kvmem:{name}", help, value=counts[name])

    def _counts(self, found: Sequence[tuple[str, MemoryStats]]) -> Counts[str]:
        with self._lock:
            for name in self._last.keys() - {name for name, _ in found}:
                self._ended.update(self._last.pop(name))
            for name, stats in found:
                if stats.tiers is None:
                    continue
                now = {
                    "stage_out_waits": stats.tiers.n_flush_waits + stats.tiers.n_put_waits,
                    "integrity_failures": stats.tiers.n_damaged,
                }
                last = self._last.get(name, {})
                if any(now[key] < n for key, n in last.items()):  # it was opened again
                    self._ended.update(last)
                self._last[name] = now
            total = Counts(self._ended)
            for counts in self._last.values():
                total.update(counts)
            return total


def _llamacpp(kind: str, rows: Iterable[tuple[str, str, float]]) -> str:
    """As llama-server writes them: it calls a maximum a counter, and its numbers have six digits."""
    return "".join(
        f"# HELP llamacpp:{name} {help}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:g}\n"
        for name, help, value in rows
    )

"""The newest recalls of each workspace, for whoever watches: which blocks, from where, with what score."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..memory.report import RecallReport

_N_KEPT: Final = 64  # of one workspace
_N_WORKSPACES: Final = 256


class RecallHistory:
    """In RAM, and gone with the server. Any thread."""

    def __init__(self, left: Callable[[int], None] = lambda _n: None) -> None:
        """left: called with the number of blocks that a recall has sent out of the view."""
        self._left: Final = left
        self._lock: Final = threading.Lock()
        self._number = 0
        self._of: Final[OrderedDict[str, deque[dict[str, Any]]]] = OrderedDict()

    def add(self, name: str, report: RecallReport) -> None:
        """A recall in the workspace with this name in the store."""
        told = report_object(report)
        with self._lock:
            self._number += 1
            kept = self._of.setdefault(name, deque(maxlen=_N_KEPT))
            self._of.move_to_end(name)
            n_left = len(_starts(kept[-1]) - _starts(told)) if kept else 0
            kept.append({"number": self._number, "time": time.time(), **told})
            while len(self._of) > _N_WORKSPACES:
                self._of.popitem(last=False)
        self._left(n_left)

    def since(self, name: str, number: int = 0) -> list[dict[str, Any]]:
        """The kept recalls of a workspace that are newer than `number`, oldest first."""
        with self._lock:
            return [recall for recall in self._of.get(name, ()) if recall["number"] > number]

    def forget(self, name: str) -> None:
        with self._lock:
            self._of.pop(name, None)


def _starts(recall: Mapping[str, Any]) -> set[int]:
    """First tokens of the blocks of a view; what is only read for the query is none of them."""
    return {block["start"] for block in recall["blocks"] if block["why"] != "query"}


def report_object(report: RecallReport) -> dict[str, Any]:
    """A recall as clients are told it: positions and counts in tokens, times in milliseconds; no texts."""
    times = report.timings
    return {
        "n_view": report.n_view,
        "n_candidates": report.n_candidates,
        "n_selected": report.n_selected,
        "n_held": report.n_held,
        "noop": report.noop,
        "mid_answer": report.mid_answer,
        "timings": {
            "score_ms": times.score_s * 1000,
            "select_ms": times.select_s * 1000,
            "apply_ms": times.apply_s * 1000,
            "refresh_ms": times.refresh_s * 1000,
            "replay_ms": times.replay_s * 1000,
        },
        "blocks": [
            {
                "start": int(block.start),
                "count": block.count,
                "why": block.why,
                "rank": block.rank,
                "score": block.score,
                "channels": _plain(block.channels),
                "tier": block.tier,
                "resident": block.resident,
                "age": block.age,
                "recomputed": block.recomputed,
                "carried": block.carried,
            }
            for block in report.blocks
        ],
    }


def _plain(ranks: Mapping[str, int]) -> dict[str, int]:
    return {name: int(rank) for name, rank in ranks.items()}

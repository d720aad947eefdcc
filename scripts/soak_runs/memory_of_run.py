"""A process that reads a text in many steps and says what that took of memory, descriptors, threads and disk.

memory_of_run.py '{"model": ..., "policy": ..., "text": FILE, "folder": ..., ...}'        see budgets.Load
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

PEAK_EVERY = 0.02  # seconds
ASK_EVERY = 10  # steps
N_QUESTION, N_ANSWER = 24, 4  # tokens


def rss_anon() -> int:
    """Bytes of anonymous memory of this process that are in RAM; the mapped file of the model is not."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def descriptors() -> tuple[int, int]:
    """(descriptors of segment files, all others)"""
    n_segments = n_others = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # that of listdir itself
            continue
        if path.startswith("/proc/"):  # what is read to know all this
            continue
        is_segment = path.endswith(".gguf") and "/segments/" in path
        n_segments += is_segment
        n_others += not is_segment
    return n_segments, n_others


class Peak(threading.Thread):
    """Looks at the memory again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.nbytes = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(PEAK_EVERY):
            self.nbytes = max(self.nbytes, rss_anon())


def measure(load: dict[str, Any]) -> dict[str, Any]:
    from kvmem_llama.engine.sampler import SamplingParams
    from kvmem_llama.settings import Settings
    from kvmem_llama.workspace import open_engine

    is_durable = load["policy"] == "kvmem"
    settings = Settings(
        n_ctx=load["n_ctx"], n_threads=load["n_threads"], policy=load["policy"], data_dir=load["folder"],
        host_budget=load["host_budget"], segment_records=load["segment_records"],
    )  # fmt: skip
    rss, segments, others, readers, threads = [], [], [], [], []
    blocks, index_nbytes = [], 0
    peak = Peak()
    with open_engine(load["model"], settings) as engine:
        text = Path(load["text"]).read_text(encoding="utf-8")
        tokens = engine.core.model.vocab.tokenize(text, add_bos=True, parse_special=False)[: load["n_tokens"]]
        assert len(tokens) == load["n_tokens"], f"the text has {len(tokens)} tokens"
        with engine.workspace("budgets" if is_durable else None) as ws:
            peak.start()
            size = -(-len(tokens) // load["n_steps"])
            for i, start in enumerate(range(0, len(tokens), size)):
                ws.read_tokens(tokens[start : start + size]).result()
                if i % ASK_EVERY == ASK_EVERY - 1:
                    asked = tokens[start // 2 : start // 2 + N_QUESTION]
                    ws.step(asked, 0, sampling=SamplingParams(temp=0), max_tokens=N_ANSWER).result()
                stats = ws.stats()
                n_segments, n_others = descriptors()
                rss.append(rss_anon())
                segments.append(n_segments)
                others.append(n_others)
                n_readers = sum(thread.name.startswith("kvmem-read") for thread in threading.enumerate())
                readers.append(n_readers)
                threads.append(len(os.listdir("/proc/self/task")) - n_readers)
                blocks.append(stats.n_blocks)
                index_nbytes = stats.index_bytes
            peak.ended.set()
            peak.join()
        record_nbytes = engine.core.hooks.layout.nbytes if engine.core.hooks is not None else 0
        row_nbytes = 0
        disk_nbytes = 0
        if is_durable:
            root = engine.shelf.root
            place = root.find("budgets")
            with root.family(place.family) as family:
                row_nbytes = family.binding.index_shape.row_nbytes
                disk_nbytes = family.disk_bytes()
    return {
        "peak": max(peak.nbytes, *rss), "rss": rss, "segments": segments, "others": others,
        "readers": readers, "threads": threads, "blocks": blocks, "index_nbytes": index_nbytes,
        "record_nbytes": record_nbytes, "row_nbytes": row_nbytes, "disk_nbytes": disk_nbytes,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))

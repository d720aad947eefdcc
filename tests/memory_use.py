"""What a process takes that opens a model and answers a short question; run as a program of its own.

    python tests/memory_use.py MODEL OPTIONS        OPTIONS: JSON of Settings

Prints one line of JSON: the plan's estimate and what the system counts, in bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TEXT = "The harbour master wrote down every ship, its cargo and the weather of that day. " * 12


def resident() -> dict[str, int]:
    """Bytes of RAM by kind: the file of the model, other files, anonymous memory."""
    sizes = {"model": 0, "files": 0, "anonymous": 0}
    kind = "anonymous"
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            path = words[5] if len(words) > 5 else ""
            kind = "model" if path.endswith(".gguf") else "files" if path.startswith("/") else "anonymous"
        elif words[0] == "Rss:":
            sizes[kind] += int(words[1]) * 1024
    return sizes


def main() -> None:
    from kvmem_llama.engine.sampler import SamplingParams
    from kvmem_llama.settings import Settings
    from kvmem_llama.workspace import open_engine

    settings = Settings(**json.loads(sys.argv[2]))
    with open_engine(sys.argv[1], settings) as engine, engine.workspace() as workspace:
        opened = resident()
        sampling = SamplingParams(temp=0)
        workspace.ask("What is this?", [("log", TEXT)], sampling=sampling, max_tokens=4).result()
        used = resident()
        plan = engine.plan
        assert plan is not None
        records = int(workspace.n_tokens * plan.costs.record)
        print(json.dumps({
            "estimated": plan.needs.n_memory + records,
            "measured": sum(used.values()),
            "records": records,
            "parts": dict(plan.needs.host) | {"mapped": plan.needs.mapped},
            "opened": opened,
            "used": used,
        }))  # fmt: skip


if __name__ == "__main__":
    main()

"""`kvmem` with the fake engine, as a program of its own: python chat_driver.py SCRIPT ARGUMENTS.

SCRIPT: JSON, fields of fake_engine.Script, and
  hold_piece, hold_read   number of the piece of an answer, count of tokens read, before which it waits to be
                          told to stop or cancel
  deaf                    true: it waits for ever, whatever it is told
  recalls                 true: every answer begins with a recall
  log                     path of a file that gets what was asked, read and committed; LOG.held is made when
                          it begins to wait
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_engine import Script, recall_report

import kvmem_llama.models
from kvmem_llama.cli.main import main


def _script(fields: dict[str, Any], log: str) -> Script:
    holds = {name: fields.pop(name, None) for name in ("hold_piece", "hold_read")}
    heard = threading.Event() if fields.pop("deaf", False) else None
    reports = [recall_report()] if fields.pop("recalls", False) else []
    script = Script(**fields, reports=reports)

    def wait_at(place: int | None) -> Callable[[int], None]:
        def wait(i: int) -> None:
            if i == place:
                Path(f"{log}.held").touch()
                (heard or script.told).wait()

        return wait

    script.before_piece, script.before_read = wait_at(holds["hold_piece"]), wait_at(holds["hold_read"])
    return script


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    log = fields.pop("log")
    script = _script(fields, log)
    sys.modules["kvmem_llama.workspace"] = script.module()
    sampler: Any = SimpleNamespace(
        SamplingParams=SimpleNamespace(of=lambda settings, n_view: (settings, n_view))
    )
    sys.modules["kvmem_llama.engine.sampler"] = sampler
    kvmem_llama.models.resolve = lambda *_: Path("m")  # type: ignore[assignment]
    code = main(sys.argv[2:])
    asked = [question for question, *_ in script.asked]
    seen = {"asked": asked, "read": script.read, "committed": script.committed, "code": code}
    Path(log).write_text(json.dumps(seen), encoding="utf-8")
    sys.exit(code)

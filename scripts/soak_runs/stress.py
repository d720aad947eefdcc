"""Processes at work on the workspaces of one family at once, one of them verifying all the time; and two
workspaces at work in one process."""

from __future__ import annotations

import subprocess
import sys
import time

from .common import ROOT, fast_folder, say


def run(minutes: float = 10.0) -> None:
    with fast_folder() as folder:
        command = [sys.executable, str(ROOT / "tests" / "store_stress.py"), str(folder), str(60 * minutes)]
        began = time.monotonic()
        # Whoever waits for somebody else for so long waits for ever.
        done = subprocess.run(command, check=False, timeout=60 * minutes + 300)
        assert done.returncode == 0, "see above"
        say(f"{time.monotonic() - began:.0f} s, no deadlock, no finding")

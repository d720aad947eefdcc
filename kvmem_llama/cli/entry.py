"""What the installed `kvmem` starts with: next to nothing, so that Ctrl-C finds a handler early."""

from __future__ import annotations

import gc


def main() -> int:
    """Runs the command of the process's arguments -> its exit code."""
    try:
        gc.disable()  # imports make little garbage, and looking for it takes a tenth of their time
        from .main import main as run  # takes a while to load

        gc.freeze()
        gc.enable()
        return run()
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT

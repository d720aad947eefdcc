"""What the installed `kvmem` starts with: next to nothing, so that Ctrl-C finds a handler early."""

from __future__ import annotations


def main() -> int:
    """Runs the command of the process's arguments -> its exit code."""
    try:
        from .main import main as run  # takes a while to load

        return run()
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT

"""Several processes at work on one family, one of them verifying all the time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SECONDS = 30


def test_processes_that_share_a_family_never_damage_it(folder: Path) -> None:
    folder.mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); import store_stress; from pathlib import Path; "
        f"sys.exit(store_stress.main(Path({str(folder)!r}), {SECONDS}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

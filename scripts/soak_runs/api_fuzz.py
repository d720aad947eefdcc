"""schemathesis on every route of a server, those that generate, too: no server error, no slot leaked."""

from __future__ import annotations

import sys
from pathlib import Path

from .common import ROOT, fast_folder, say

sys.path.insert(0, str(ROOT / "tests" / "compat"))

from fuzzing import fuzz
from servers import our_server


def run(model: Path, minutes: float = 10.0) -> None:
    with fast_folder() as folder, our_server(model, folder, "-n", "4", "--slots") as server:
        text = fuzz(server, seconds=int(60 * minutes), n_examples=1_000_000, patience=120)
        say(next((line.strip() for line in text.splitlines() if "generated" in line), ""))
        assert server.client.get("/health").status_code == 200
        assert not any(slot["is_processing"] for slot in server.client.get("/slots").json())

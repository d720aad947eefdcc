"""The fake model with heads that a token index takes, and calibrations of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import fake_model
import numpy as np
import pytest

from kvmem_llama.calibration import CalibratedHead, Calibration, dump

D = 32


def widen(patch: pytest.MonkeyPatch) -> None:
    """From now on heads of the fake model have 32 dims, and layers 2 query heads of one KV head."""
    row = D * 4
    layers = tuple(replace(layer, d_k=D, raw_k_row=row, k_row=row) for layer in fake_model.LAYERS)
    patch.setattr(fake_model, "_D", D)
    patch.setattr(fake_model, "LAYERS", layers)


def calibration(
    heads: Sequence[tuple[int, int]] = ((2, 0), (0, 1), (2, 1)), *, centred: bool = True, **changes: object
) -> Calibration:
    """heads: (layer, query head)."""
    rng = np.random.default_rng(1)
    made = Calibration(
        model=fake_model.FINGERPRINT,
        model_name="fake",
        heads=tuple(
            CalibratedHead(il, head, 0.5, tuple(rng.normal(0, 0.1, D).tolist()) if centred else None)
            for il, head in heads
        ),
        centred=centred,
        index_type="q8_0",
        spread={"heads": 0.25, "lexical": 0.5},
        shares={"heads": 0.3, "lexical": 0.2},
        weights={"heads": 0.6, "lexical": 0.4},
        measured={},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def write(folder: Path, of: Calibration, name: str = "calibration.json") -> str:
    """The path of a file that holds a calibration."""
    dump(of, folder / name)
    return str(folder / name)

"""The rows of all cases as a page of text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .measures import paired
from .run import METHODS, Found, Options, Row

FIGURES = {
    "coverage": "coverage of the evidence tokens",
    "mass": "true attention captured, of that on the candidate blocks",
    "kl": "KL to full context over the gold answer, nats per token",
    "nll": "surprise at the gold answer, nats per token",
}
DIFFERENCES = (
    ("coverage", "random"),
    ("coverage", "window"),
    ("mass", "random"),
    ("kl", "random"),
    ("kl", "window"),
)


def summary(options: Options, found: Found, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that is printed, and the rows."""
    groups = {"all": list(rows)}
    groups |= {kind: [r for r in rows if r["kind"] == kind] for kind in ("plain", "lookalike")}
    return {
        "model": options.model,
        "n_view": options.settings.n_ctx,
        "n_sink": options.settings.n_sink,
        "n_recent": options.settings.n_recent,
        "block_size": options.settings.block_size,
        "seed": options.seed,
        "n_cases": {kind: len(group) for kind, group in groups.items()},
        "n_histories": len({r["history"] for r in rows}),
        "n_skipped": found.n_skipped,
        "absent": list(found.absent),
        "n_history": [min(r["n_history"] for r in rows), max(r["n_history"] for r in rows)],
        "mass_on_history": _mean(rows, "mass_history"),
        "mass_on_candidates": _mean(rows, "mass_candidates"),
        "nll_full": {kind: _mean(group, "nll_full") for kind, group in groups.items() if group},
        "means": {
            kind: {f"{b:g}": {m: _figures(group, b, m) for m in METHODS} for b in options.budgets}
            for kind, group in groups.items()
            if group
        },
        "differences": {
            kind: {f"{b:g}": _differences(group, b) for b in options.budgets}
            for kind, group in groups.items()
            if group
        },
        "cases": list(rows),
    }


def page(result: dict[str, Any]) -> str:
    n, (low, high) = result["n_cases"], result["n_history"]
    lines = [
        f"{n['all']} cases ({n['plain']} plain, {n['lookalike']} lookalike), {result['n_skipped']} skipped; "
        f"{result['n_histories']} texts of {low} to {high} tokens",
        f"blocks of {result['block_size']}; every view also holds sink {result['n_sink']} and recent "
        f"{result['n_recent']}; read and first pass over a canonical view of {result['n_view']}",
        f"of the question's attention {_percent(result['mass_on_history'])} falls on the history, "
        f"{_percent(result['mass_on_candidates'])} on candidate blocks",
    ]
    for figure, title in FIGURES.items():
        lines += ["", f"{title:62}" + "".join(f"{method:>9}" for method in METHODS)]
        for kind, budgets in result["means"].items():
            for budget, methods in budgets.items():
                values = [methods[method][figure] for method in METHODS]
                start = f"  {kind:10} budget {100 * float(budget):g}%"
                if figure == "nll":
                    start += f"   (full context {result['nll_full'][kind]:.3f})"
                lines.append(f"{start:62}" + "".join(f"{value:9.3f}" for value in values))
    lines += ["", "paired differences, mean and 95% bound over cases; over texts with all their cases"]
    for kind, budgets in result["differences"].items():
        for budget, pairs in budgets.items():
            for name, found in pairs.items():
                if kind == "all" or name == "coverage: kvmem - random":
                    bounds = "   ".join(
                        f"[{a:+.3f}, {b:+.3f}]" for a, b in (found["cases"], found["histories"])
                    )
                    start = f"  {kind:10} budget {100 * float(budget):g}%"
                    lines.append(f"{start:25}{name:26}{found['mean']:+8.3f}   {bounds}")
    return "\n".join(lines)


def _figures(rows: Sequence[Row], budget: float, method: str) -> dict[str, float]:
    found = [row["budgets"][f"{budget:g}"][method] for row in rows]
    return {figure: float(np.mean([f[figure] for f in found])) for figure in found[0]}


def _differences(rows: Sequence[Row], budget: float) -> dict[str, dict[str, Any]]:
    """Of every figure in DIFFERENCES: mean and bounds."""
    found = [row["budgets"][f"{budget:g}"] for row in rows]
    groups = [row["history"] for row in rows]
    out = {}
    for figure, other in DIFFERENCES:
        ours, theirs = ([f[method][figure] for f in found] for method in ("kvmem", other))
        out[f"{figure}: kvmem - {other}"] = asdict(paired(ours, theirs, groups))
    return out


def _mean(rows: Sequence[Row], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"

"""Tables and the figure of measured coverage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .coverage import BUDGETS, Found

BEGIN, END = "<!-- bench_retrieval: begin -->", "<!-- bench_retrieval: end -->"
SHOWN = ("random", "mean_k", "heads", "lexical", "uncalibrated", "default")
"""Ways of searching on the page, in this order."""


def groups_of(found: Sequence[Found]) -> dict[str, list[Found]]:
    """By what a row of the tables is about: set and kind of question, and length."""
    out: dict[str, list[Found]] = {}
    for one in found:
        name = "reworded" if one.kind == "reworded" else one.set
        out.setdefault(f"{name}, {one.length}", []).append(one)
    return out


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; NaN for a single value."""
    x = np.asarray(values)
    return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("nan")


def table(found: Sequence[Found]) -> list[str]:
    """Means and standard errors of every way at every budget."""
    lines = ["coverage at  " + "   ".join(f"{budget} tokens" for budget in BUDGETS)]
    for name, some in groups_of(found).items():
        lines.append(f"{name}: {len(some)} questions")
        for way in dict.fromkeys(way for way, _ in some[0].coverage):
            cells = [mean_and_error([f.coverage[way, b] for f in some]) for b in BUDGETS]
            lines.append(f"  {way:24}" + "   ".join(f"{mean:.3f} ±{error:.3f}" for mean, error in cells))
        lines += [f"  {line}" for line in comparisons(some)]
    return lines


def comparisons(some: Sequence[Found]) -> list[str]:
    """The default against the better of its channels, and without calibration against words alone: paired
    differences in standard errors."""
    lines = []
    for way, channels in (("default", ("heads", "lexical")), ("uncalibrated", ("lexical",))):
        if not {(c, BUDGETS[0]) for c in (way, *channels)} <= some[0].coverage.keys():
            continue
        cells = []
        for budget in BUDGETS:
            best, mean, error = _against_best(some, way, channels, budget)
            in_errors = f" {mean / error:+.1f} SE" if error > 0 else ""
            cells.append(f"{mean:+.3f}{in_errors} ({best})")
        lines.append(f"{way} - best channel: " + "   ".join(cells))
    return lines


# -- the page


def load(path: Path) -> tuple[str, list[Found]]:
    """(name of the model, figures) of a file that bench_retrieval --json has written."""
    content = json.loads(path.read_text(encoding="utf-8"))
    found = []
    for row in content["found"]:
        cover = {}
        for key, value in row["coverage"].items():
            way, _, budget = key.rpartition("@")
            cover[way, int(budget)] = value
        found.append(Found(**(row | {"coverage": cover})))
    return content["model"], found


def write_page(page: Path, files: Sequence[Path]) -> None:
    """Puts the tables of all files between the marks of the page, and the figure beside it."""
    by_model: dict[str, list[Found]] = {}
    for model, found in map(load, files):
        by_model.setdefault(model, []).extend(found)
    models = list(by_model.items())
    lines: list[str] = []
    for model, found in models:
        lines += ["", f"### {model}", "", *_markdown(found)]
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + BEGIN, *lines, "", END + after]), encoding="utf-8", newline="\n")
    _plot(page.with_suffix(".svg"), models)


def _markdown(found: Sequence[Found]) -> list[str]:
    lines = [
        "| set, length | n | " + " | ".join(SHOWN) + " | default - better channel |",
        "|---|---|" + "---|" * (len(SHOWN) + 1),
    ]
    for name, some in groups_of(found).items():
        cells = []
        for way in SHOWN:
            if (way, 512) in some[0].coverage:
                means = [np.mean([f.coverage[way, b] for f in some]) for b in BUDGETS]
                cells.append(" / ".join(f"{mean:.2f}".lstrip("0") for mean in means))
            else:
                cells.append("")
        channels = [c for c in ("heads", "lexical") if (c, 512) in some[0].coverage]
        _, mean, error = _against_best(some, "default", channels, 512)
        lines.append(f"| {name} | {len(some)} | " + " | ".join(cells) + f" | {mean:+.3f} ± {error:.3f} |")
    return lines


def _against_best(
    some: Sequence[Found], way: str, channels: Sequence[str], budget: int
) -> tuple[str, float, float]:
    """The best of the channels, and the paired difference of a way to it: mean and standard error."""
    best = max(channels, key=lambda c: np.mean([f.coverage[c, budget] for f in some]))
    return best, *mean_and_error([f.coverage[way, budget] - f.coverage[best, budget] for f in some])


def _plot(path: Path, models: Sequence[tuple[str, list[Found]]]) -> None:
    """Coverage at 512 tokens by set and length. Wants Matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "retrieval"  # the same figures give the same file
    figure, axes = plt.subplots(
        len(models), 1, figsize=(10, 3.6 * len(models)), layout="constrained", squeeze=False
    )
    for axis, (model, found) in zip(axes[:, 0], models, strict=True):
        groups = groups_of(found)
        at = np.arange(len(groups))
        ways = [way for way in SHOWN if (way, 512) in found[0].coverage]
        for i, way in enumerate(ways):
            pairs = [mean_and_error([f.coverage[way, 512] for f in some]) for some in groups.values()]
            means, errors = zip(*pairs, strict=True)
            axis.bar(at + (i - len(ways) / 2 + 0.5) * 0.14, means, 0.13, yerr=errors, label=way)
        axis.set_xticks(at, [name.replace(", ", "\n") for name in groups], fontsize=8)
        axis.set(title=model, ylabel="coverage at 512 tokens", ylim=(0, 1))
        axis.grid(axis="y", alpha=0.3)
    axes[0, 0].legend(ncols=len(SHOWN), fontsize=8)
    figure.savefig(path, metadata={"Date": None})

"""All cases, text by text: read twice (whole, and over the canonical view), then question by question."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvmem_llama.memory.selector import select
from kvmem_llama.native.layout import F32
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import WorkspaceEngine, open_engine

from .attention import attention_mass
from .cases import Cases, History, Sources
from .measures import F64, I64, coverage, divergence, share, surprise
from .passes import Choose, Reader, full_pass, history_keys, recalls
from .prompts import Prompt, prompts_of

METHODS = ("kvmem", "window", "random", "oracle")
N_DRAWS = 20  # random selections whose coverage and mass are averaged
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    settings: Settings  # of the engine that recalls; the other one differs in the view only
    budgets: tuple[float, ...]  # selected tokens as shares of the history
    n_kl_draws: int  # random selections whose KL is averaged
    seed: int


@dataclass(frozen=True, slots=True)
class Found:
    """What can run here."""

    texts: tuple[tuple[History, str], ...]  # with the excerpt
    n_skipped: int  # cases whose text is not here
    absent: tuple[str, ...]  # sources


def find(cases: Cases, sources: Sources) -> Found:
    """Raises ChangedSource."""
    texts, absent, n_skipped = [], set(), 0
    for history in cases.histories:
        source = sources.text(history)
        if source is None:
            absent.add(history.source)
            n_skipped += len(cases.of(history.id))
        else:
            texts.append((history, history.text(source)))
    return Found(tuple(texts), n_skipped, tuple(sorted(absent)))


def run(options: Options, found: Found, cases: Cases, n_cases: int) -> list[Row]:
    """One row per case; the first `n_cases` of those whose text is here, 0: all."""
    plan, left = [], n_cases or len(cases.cases)
    for history, text in found.texts:
        chosen = cases.of(history.id)[:left]
        left -= len(chosen)
        if chosen:
            plan.append((history, text, chosen))
    rows: list[Row] = []
    began = time.monotonic()
    with ExitStack() as stack:
        whole = stack.enter_context(open_engine(options.model, replace(options.settings, n_ctx=0)))
        paged = stack.enter_context(open_engine(options.model, options.settings))
        for number, (history, text, chosen) in enumerate(plan, 1):
            prompts = prompts_of(whole.core.model, history, text, chosen)
            say = _say(f"text {number}/{len(plan)}, {history.id}")
            rows += _one_history(options, (whole, paged), prompts, say)
            seconds = time.monotonic() - began
            n_left = sum(len(c) for _, _, c in plan) - len(rows)
            to_go = seconds / len(rows) * n_left
            say(f"{len(rows)} cases in {seconds / 60:.1f} min, about {to_go / 60:.1f} to go")
    return rows


def _one_history(
    options: Options,
    engines: tuple[WorkspaceEngine, WorkspaceEngine],
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> list[Row]:
    tokens = prompts[0].tokens[: prompts[0].n_history]
    whole, paged = (Reader(engine) for engine in engines)
    try:
        for reader, what in ((whole, "the whole context"), (paged, "the canonical view")):
            began = time.monotonic()
            reader.read(tokens)
            say(f"{len(tokens)} tokens read over {what} in {time.monotonic() - began:.0f} s")
        keys = history_keys(whole)
        return [_one_case(options, whole, paged, prompt, keys) for prompt in prompts]
    finally:
        whole.close()
        paged.close()


def _one_case(options: Options, whole: Reader, paged: Reader, prompt: Prompt, keys: list[F32]) -> Row:
    block = paged.session.budget.block
    asked = full_pass(whole, prompt)
    layers = [layer for layer in whole.session.hooks.layers if layer.cache == 0]
    mass = attention_mass(layers, keys, asked, block)
    rng = np.random.default_rng([options.seed, zlib.crc32(prompt.case.id.encode())])
    draws: dict[float, list[I64]] = {}
    sizes = {share: max(int(share * prompt.n_history) // block, 1) for share in options.budgets}
    done = recalls(paged, prompt, _chooser(sizes, mass, rng, draws, options.n_kl_draws))
    candidates = done.candidates
    row: Row = {
        "id": prompt.case.id,
        "history": prompt.case.history,
        "kind": prompt.case.kind,
        "n_history": prompt.n_history,
        "n_candidates": len(candidates),
        "n_evidence": len(prompt.evidence),
        "mass_candidates": float(mass[candidates].sum()),
        "mass_history": float(mass.sum()),
        "nll_full": surprise(asked.logits, prompt.answer),
        "budgets": {},
    }
    everything = np.arange(len(mass))
    for budget, n_blocks in sizes.items():
        figures: Row = {"n_blocks": n_blocks}
        for method in METHODS:
            chosen = draws[budget] if method == "random" else [done.selected[_name(method, budget)]]
            names = [name for name in done.logits if name.startswith(_name(method, budget))]
            figures[method] = {
                "coverage": _mean(coverage(prompt.evidence, blocks, block) for blocks in chosen),
                "mass": _mean(share(mass, blocks, candidates) for blocks in chosen),
                "mass_of_history": _mean(share(mass, blocks, everything) for blocks in chosen),
                "kl": _mean(divergence(asked.logits, done.logits[name]) for name in names),
                "nll": _mean(surprise(done.logits[name], prompt.answer) for name in names),
            }
        row["budgets"][f"{budget:g}"] = figures
    return row


def _chooser(
    sizes: Mapping[float, int],
    mass: F64,
    rng: np.random.Generator,
    draws: dict[float, list[I64]],
    n_kl_draws: int,
) -> Choose:
    """The views to ask over; leaves the random selections in `draws`."""

    def choose(candidates: I64, scores: F64) -> dict[str, I64]:
        views = {}
        for budget, n in sizes.items():
            draws[budget] = [np.sort(rng.choice(candidates, n, replace=False)) for _ in range(N_DRAWS)]
            views[_name("kvmem", budget)] = select(scores, candidates, n)
            views[_name("window", budget)] = candidates[-n:]
            views[_name("oracle", budget)] = select(mass[candidates], candidates, n)
            for i, blocks in enumerate(draws[budget][:n_kl_draws]):
                views[_name("random", budget) + str(i)] = blocks
        return views

    return choose


def _name(method: str, budget: float) -> str:
    return f"{method}@{budget:g}#"


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _say(start: str) -> Callable[[str], None]:
    return lambda text: print(f"{start}: {text}", file=sys.stderr, flush=True)

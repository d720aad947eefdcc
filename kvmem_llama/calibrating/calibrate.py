"""From a model file to its calibration."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ..calibration import NONE, CalibratedHead, Calibration
from ..engine.vocab import Vocab
from ..errors import ModelUnsupported
from ..gguf_info import check_policy, read_model_info
from ..memory.channels import SHARES, WEIGHTS
from ..memory.texts import BlockTexts
from ..native.layout import I32, LayerInfo
from ..settings import Settings
from ..workspace import WorkspaceEngine, open_engine
from .cases import Case, facts_case, words_case
from .choosing import Trial, choose, figures, head_scores
from .facts import FACTS
from .ranking import COST, Head, Ranked, best_heads, index_bytes, mean_k_bytes, rank_on
from .reading import F64, Read, read_and_ask
from .texts import CHOOSING, RANKING

BLOCK: Final = 32  # tokens
N_VIEW: Final = 2048  # tokens; what a query's first pass sees does not change much beyond it


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is read and asked."""

    n_tokens: int = 5632  # of each of the four histories
    n_questions: int = 40  # of each history that heads are ranked on
    n_facts: int = len(FACTS)  # passages in each of the others


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is; not in seconds, but even."""

    done: int
    total: int


def calibrate(
    path: Path, settings: Settings, report: Callable[[Progress], None], effort: Effort | None = None
) -> Calibration:
    """Calibrates the model in the file at `path`.

    settings: of the engine; those of memory are set here. report: called often, on other threads too.
    Raises ModelError (also for a model whose keys cannot be captured), LibraryError, EngineError, or
    InputError (the texts are not there).
    """
    info = read_model_info(path)
    check_policy(info, "kvmem")
    n_view = min(N_VIEW, info.n_ctx_train)
    settings = replace(
        settings,
        policy="kvmem", score="mean_k", calibration=NONE, layers_scored="all", n_parallel=1,
        block_size=BLOCK, n_sink=BLOCK, n_ctx=n_view, n_recent=n_view // 8, n_reserve=-1, n_prefill_view=0,
        first_pass="canonical", position_mode="auto",
    )  # fmt: skip
    with open_engine(path, settings) as engine:
        found = _Calibrating(engine, BLOCK, effort or Effort(), report)
        return found.run(info.fingerprint, info.name)


class _Calibrating:
    def __init__(
        self, engine: WorkspaceEngine, block: int, effort: Effort, report: Callable[[Progress], None]
    ) -> None:
        self._engine = engine
        self._block = block
        self._report = report
        self._done = 0
        n, half = effort.n_tokens, len(CHOOSING)
        self._ranking = [words_case(s, self._tokens, n, effort.n_questions) for s in RANKING]
        self._choosing = [
            facts_case(s, self._tokens, n, effort.n_facts, i % half) for i, s in enumerate(CHOOSING)
        ]
        self._total = sum(map(self._cost, self._ranking + self._choosing))
        self._total += sum(len(case.questions) for case in self._ranking) * COST

    def run(self, model: str, model_name: str) -> Calibration:
        ranked, layers = self._rank()
        agreement = _mean([one.agreement for one in ranked])
        heads = best_heads(agreement, layers, self._block)
        if not heads:
            raise ModelUnsupported(
                self._engine.core.model.arch, "no index can hold its keys, which are not whole blocks of 32",
                hint="Use --score lexical or --score mean_k with it.",
            )  # fmt: skip
        mean_q = {
            head: np.sum([one.sum_q[head] for one in ranked], axis=0) / sum(one.n_q for one in ranked)
            for head in heads
        }
        trials = [trial for case in self._choosing for trial in self._trials(case, heads, mean_q)]
        chosen = choose(trials, self._block)
        both = [set(best_heads(one.agreement, layers, self._block)) for one in ranked]
        return Calibration(
            model=model,
            model_name=model_name,
            heads=tuple(
                CalibratedHead(
                    *head, round(agreement[head], 4), _rounded(mean_q[head]) if chosen.centred else None
                )
                for head in heads
            ),
            centred=chosen.centred,
            index_type="q4_0",
            spread=chosen.spread,
            shares=SHARES,
            weights=WEIGHTS,
            measured={
                "index_bytes_per_token": index_bytes(heads, layers),
                "mean_k_bytes_per_token": round(mean_k_bytes(layers, self._block), 1),
                "n_heads_of_model": sum(layer.n_head for layer in layers),
                "n_heads_by_prose_and_by_code": len(both[0] & both[1]),
                "n_questions_ranking": sum(len(case.questions) for case in self._ranking),
                "n_questions_choosing": len(trials),
                "texts_of": f"Python {platform.python_version()}",
                **figures(trials, chosen, self._block),
            },
        )

    def _rank(self) -> tuple[list[Ranked], Sequence[LayerInfo]]:
        ranked = []
        layers: Sequence[LayerInfo] = ()
        for case in self._ranking:
            read = self._read(case)
            layers = read.layers
            ranked.append(
                rank_on(read, [scores for scores, _ in self._word_scores(case)], self._block, self._step)
            )
        return ranked, layers

    def _trials(self, case: Case, heads: Sequence[Head], mean_q: dict[Head, F64]) -> list[Trial]:
        read = self._read(case)
        by_heads = head_scores(read, heads, mean_q, self._block)
        trials = []
        for i, (question, found) in enumerate(zip(case.questions, self._word_scores(case), strict=True)):
            assert question.answer is not None
            words, most = found
            trials.append(
                Trial(
                    about=question.about,
                    candidates=read.candidates,
                    blocks=np.arange(*question.answer, dtype=np.int64) // self._block,
                    lexical=words[read.candidates],
                    known=float(words[read.candidates].max()) / (most or 1.0),
                    mean_k=read.asked[i].mean_k,
                    heads=by_heads[i],
                )
            )
        return trials

    def _read(self, case: Case) -> Read:
        questions = [self._tokens(question.text) for question in case.questions]
        return read_and_ask(self._engine, case.tokens, questions, self._step)

    def _word_scores(self, case: Case) -> list[tuple[F64, float]]:
        """Of each question: scores of all blocks by words, as BlockTexts.search has them."""
        vocab = self._engine.core.model.vocab
        texts = BlockTexts(lambda tokens: _text(vocab, tokens), self._block)
        n = len(case.tokens) // self._block
        return [texts.search(q.text, lambda start, end: case.tokens[start:end], n) for q in case.questions]

    def _tokens(self, text: str) -> I32:
        return self._engine.core.model.vocab.tokenize(text, parse_special=False)

    def _cost(self, case: Case) -> int:
        return len(case.tokens) + sum(len(self._tokens(question.text)) for question in case.questions)

    def _step(self, n: int) -> None:
        self._done += n
        self._report(Progress(self._done, self._total))


def _text(vocab: Vocab, tokens: I32) -> str:
    return vocab.detokenize(tokens, special=False).decode("utf-8", "replace")


def _mean(agreements: Sequence[dict[Head, float]]) -> dict[Head, float]:
    return {head: sum(one[head] for one in agreements) / len(agreements) for head in agreements[0]}


def _rounded(values: F64) -> tuple[float, ...]:
    """Four digits, so that what differs between two runs by rounding does not show."""
    return tuple(float(f"{value:.4g}") for value in values)

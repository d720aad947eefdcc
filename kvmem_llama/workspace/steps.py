"""Steps that answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..conversation import N_CLOSING, Asked
from ..engine.chat_template import AnyMessage
from ..engine.requests import TaskGenerator
from ..engine.sampler import SamplingParams
from ..engine.templates import AppliedTemplate, TemplateOptions
from ..engine.vocab import single_tokens
from ..errors import InvalidOption
from ..matching import Plan, match
from ..memory.query import (
    LogitsProcessor,
    StepRequest,
    StoppingCriterion,
    query_of,
    token_ids,
    token_marks,
)
from ..memory.recall_params import RecallParams
from ..memory.report import StepResult
from ..messages import check_question, messages_of, question_start, tokenize_messages, user_marks
from ..native.layout import I32
from .base import WorkspaceBase
from .running import Answer


class Asking(WorkspaceBase):
    """A workspace's steps that answer."""

    def ask(
        self,
        question: str,
        context: Sequence[tuple[str, str]] = (),
        *,
        sampling: SamplingParams | None = None,
        recall: RecallParams | None = None,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        options: TemplateOptions | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriterion] = (),
    ) -> Answer:
        """Asks a question in the model's chat template and streams the answer.

        context: texts (name, text) that belong to the question; they are read as history.
        sampling, recall: None: as the engine's options say.
        max_tokens: -1: no limit. stop: texts at which the answer ends, not part of it.
        options: what the answer may hold; tools are rendered with the first question only.
        Raises TemplateUnsupported or InvalidRequest; InputError or InvalidOption for what is no text.
        """
        check_question(question, context)
        with self._idle():
            newest = self._policy.tokens(max(self.n_tokens - N_CLOSING, 0))
            turn, applied = self._conversation.next_turn(question, context, newest, options)
            request = StepRequest(
                tokens=turn.tokens,
                query_start=turn.question,
                scored=turn.scored,
                sampling=self._sampling(sampling),
                max_tokens=max_tokens,
                stop=stop,
                kind="ask",
                recall=recall,
                logits_processors=tuple(logits_processors),
                stopping_criteria=tuple(stopping_criteria),
            )
            start = self.n_tokens
            request = self._constrained(request, applied, options)
            answer = self._start_answer(self._policy.step(request), applied)
            self._asked = Asked(start, start + turn.question, start + len(turn.tokens))
            return answer

    def chat(
        self,
        messages: str | Sequence[AnyMessage],
        *,
        sampling: SamplingParams | None = None,
        recall: RecallParams | None = None,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        options: TemplateOptions | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriterion] = (),
    ) -> Answer:
        """Answers a message that is new, given as its text; or a whole list of messages, of which the history
        may hold most: only what is new or changed is read, and the newest message is the question.

        Where the list differs from the history, the history is edited as `rewrite` does, in one step with
        the answer. messages: Message, or those of OpenAI's chat completions API, rendered in the model's chat
        template, with the workspace's system prompt first if the list has none.
        sampling, recall: None: as the engine's options say. max_tokens: -1: no limit.
        stop: texts at which the answer ends, not part of it.
        options: tools, JSON schema, how reasoning is treated. The events hold a MessagePiece for what a piece
        of text adds to the message, and the result has all of it as `message`.
        logits_processors, stopping_criteria: see memory/query.py.
        Raises InputError for messages that cannot be answered, InvalidRequest or TemplateUnsupported.
        """
        if isinstance(messages, str):
            return self.ask(
                messages,
                sampling=sampling,
                recall=recall,
                max_tokens=max_tokens,
                stop=stop,
                options=options,
                logits_processors=logits_processors,
                stopping_criteria=stopping_criteria,
            )
        with self._idle():
            vocab, settings = self._engine.core.model.vocab, self._engine.core.settings
            turn = self._conversation.render(messages_of(messages, options), options)
            whole = tokenize_messages(vocab, turn, self._policy.tokens())
            request = StepRequest(
                tokens=whole.tokens,
                query_start=question_start(turn, whole, settings.n_query),
                scored=whole.scored,
                sampling=self._sampling(sampling),
                max_tokens=max_tokens,
                stop=stop,
                kind="ask",
                recall=recall,
                user=user_marks(vocab, turn, whole.tokens),
                logits_processors=tuple(logits_processors),
                stopping_criteria=tuple(stopping_criteria),
            )
            request = self._constrained(request, turn.applied, options)
            return self._answer_whole(request, turn.applied)

    def prompt(
        self,
        tokens: Sequence[int] | I32,
        *,
        sampling: SamplingParams | None = None,
        recall: RecallParams | None = None,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        query_start: int | None = None,
        scored: NDArray[np.bool_] | None = None,
        user: NDArray[np.bool_] | None = None,
        preserved: frozenset[int] = frozenset(),
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriterion] = (),
        applied: AppliedTemplate | None = None,
        every_token: bool = False,
    ) -> Answer:
        """Goes on with a whole prompt, of which the history may hold most: only what is new or changed is
        read. Afterwards the history is the prompt and the answer.

        tokens: [n] ids, BOS included where the model wants it.
        query_start: index of the first one that may belong to the query; None: the first one that differs
            from the history, or the last one if none does. Those of the query are evaluated, and counted so,
            also where the history holds equal ones later on.
        scored: [n] which are text rather than template; None: all. user: as in `step`.
        preserved: control tokens whose text the answer's text holds.
        logits_processors, stopping_criteria: see memory/query.py.
        applied: the template that made the prompt: the answer is read as `chat` reads it. Its stops, its
        grammar and its preserved tokens are the caller's to pass on.
        every_token: the events hold a TextPiece for each token, also where it adds no text yet.
        Raises InvalidOption for tokens that are not ids of the vocabulary, and for bad marks; InputError for
        no tokens.
        """
        with self._idle():
            ids = token_ids(tokens, self._n_vocab)
            marks = token_marks(scored, len(ids))
            if query_start is None:
                query_start = max(min(match(self._policy.tokens(), ids, spans=False).prefix, len(ids) - 1), 0)
            elif not 0 <= query_start < max(len(ids), 1):
                raise InvalidOption("query_start", query_start, f"the prompt holds {len(ids)} tokens")
            request = StepRequest(
                tokens=ids,
                query_start=query_start,
                scored=marks,
                sampling=self._sampling(sampling),
                max_tokens=max_tokens,
                stop=stop,
                kind="step" if applied is None else "ask",
                recall=recall,
                user=None if user is None else token_marks(user, len(ids)) & marks,
                preserved=preserved,
                every_token=every_token,
                logits_processors=tuple(logits_processors),
                stopping_criteria=tuple(stopping_criteria),
            )
            return self._answer_whole(request, applied)

    def step(
        self,
        tokens: Sequence[int] | I32,
        query_start: int = 0,
        scored: NDArray[np.bool_] | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        user: NDArray[np.bool_] | None = None,
        recall: RecallParams | None = None,
    ) -> Answer:
        """Appends token ids and streams the answer to them.

        query_start: index of the first one that may belong to the query.
        scored: [n] which of them are text; None: all.
        user: [n] which of these are a user's rather than a tool's; None: all. A step without any is scored
            with the newest text of a user before it, too.
        Raises InvalidOption for tokens that are not [n] ids of the vocabulary, and for bad marks.
        """
        with self._idle():
            ids = token_ids(tokens, self._n_vocab)
            marks = token_marks(scored, len(ids))
            if not 0 <= query_start <= len(ids):
                raise InvalidOption("query_start", query_start, f"the step holds {len(ids)} tokens")
            request = StepRequest(
                tokens=ids,
                query_start=query_start,
                scored=marks,
                sampling=self._sampling(sampling),
                max_tokens=max_tokens,
                stop=stop,
                recall=recall,
                user=None if user is None else token_marks(user, len(ids)) & marks,
            )
            return self._start_answer(self._policy.step(request))

    # -- private

    def _sampling(self, given: SamplingParams | None) -> SamplingParams:
        return given or SamplingParams.of(self._engine.core.settings, self.n_view)

    def _constrained(
        self, request: StepRequest, applied: AppliedTemplate, options: TemplateOptions | None
    ) -> StepRequest:
        """With what the template and the options ask of the answer."""
        vocab, options = self._engine.core.model.vocab, options or TemplateOptions()
        budget, message = options.reasoning_budget, options.reasoning_budget_message
        return replace(
            request,
            sampling=applied.sampling(request.sampling, budget=budget, message=message),
            stop=(*request.stop, *applied.additional_stops),
            preserved=request.preserved | single_tokens(vocab, applied.preserved_tokens),
        )

    def _answer_whole(self, whole: StepRequest, applied: AppliedTemplate | None) -> Answer:
        """Answers a request that holds all tokens of the history there is to be."""
        stored, question = self._policy.tokens(), whole.query_start

        def request(first: int) -> StepRequest:
            return replace(
                whole,
                tokens=whole.tokens[first:],
                query_start=question - first,
                scored=whole.scored[first:],
                is_whole=True,
                user=None if whole.user is None else whole.user[first:],
            )

        # Of a long question the beginning is history, but which of it is scored is for the step to say.
        query = question + query_of(request(question), self._engine.core.settings).start
        plan = self._match(stored, whole.tokens[:query])
        if self._reuses_spans:
            plan = plan.with_prefix(question)
        elif plan.prefix > question:
            plan = self._match(stored, whole.tokens[:question])
        first = plan.prefix
        generator, edited = self._after(plan, request(first))
        answer = self._start_answer(generator, applied)
        self._edited = edited
        if whole.kind == "ask":
            self._asked = Asked(first, question, len(whole.tokens), is_whole=True)
        return answer

    def _match(self, stored: I32, wanted: I32) -> Plan:
        return match(stored, wanted, spans=self._reuses_spans)

    @property
    def _reuses_spans(self) -> bool:
        return self._engine.core.settings.reuse == "spans"

    def _after(
        self, plan: Plan, request: StepRequest | I32
    ) -> tuple[TaskGenerator[StepResult], tuple[int, int] | None]:
        """What goes on after the plan's prefix, a step or tokens that are only read, and what to note as
        edited once it runs."""
        was = self.n_tokens
        if plan.prefix < was:
            return self._policy.rewrite(plan, request), (plan.prefix, was)
        if isinstance(request, StepRequest):
            return self._policy.step(request), None
        return self._policy.read(request), None

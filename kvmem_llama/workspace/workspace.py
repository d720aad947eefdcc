"""A workspace: one history and the memory of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from ..conversation import Turn, document_text
from ..engine.answer_parser import ParsedMessage
from ..engine.sampling_params import SamplingParams, plain_int
from ..errors import InputError, InvalidOption
from ..memory.attending import AttendedBlock
from ..memory.query import StepRequest, token_ids
from ..memory.recall_params import RecallParams
from ..memory.report import Tier
from ..memory.search import SearchResult
from ..native.layout import I32
from ..occurrence import occurs
from ..policies import KVMem, MemoryStats
from ..text_file import read_text
from .by_hand import AskingByHand
from .running import Answer, Step
from .spans import Span, token_range

if TYPE_CHECKING:
    from ..store.verify import Report


class Workspace(AskingByHand):
    """One history and the memory of it. Any thread, but one step at a time: WorkspaceBusy otherwise."""

    # -- reading

    def add(self, what: str | os.PathLike[str] | Sequence[int] | I32, *, source: str = "") -> Step:
        """Reads into the history, without an answer: a text, the text of a file (a Path), or token ids, [n].

        source: a name that is read above the text; of a file its own name if none is given.
        Raises InputError for a file that cannot be read or is not text, InvalidOption for bad token ids, or a
        name for them.
        """
        if isinstance(what, str):
            return self.read(what, source)
        if isinstance(what, os.PathLike):
            return self.read(read_text(what)[0], source or os.path.basename(os.fspath(what)))
        if source:
            raise InvalidOption(
                "source", source, "token ids are read as they are",
                hint="Leave it out, or give the text itself.",
            )  # fmt: skip
        return self.read_tokens(what)

    def read(self, text: str, source: str = "") -> Step:
        """Appends a text, under the name of its source if it has one."""
        with self._idle():
            text = document_text(source, text) if source else text
            tokens = self._conversation.text_tokens(text, first=not self.n_tokens)
            return self._start(self._policy.read(tokens))

    def has_read(self, text: str, source: str = "") -> bool:
        """Whether the history holds this text already, word for word and under this name, and it is not just
        a few words long."""
        with self._idle():
            text = document_text(source, text) if source else text
            return occurs(self._conversation.text_tokens(text, first=False), self._policy.tokens())

    def read_tokens(self, tokens: Sequence[int] | I32) -> Step:
        """Appends token ids, [n]. Raises InvalidOption for anything else, naming the first bad one."""
        with self._idle():
            return self._start(self._policy.read(token_ids(tokens, self._n_vocab)))

    def rewrite(self, tokens: Sequence[int] | I32) -> Step:
        """Makes the history these token ids, [n]: a common beginning stays, equal spans after it are taken
        over as --reuse says, the rest is read.

        The tokens that are not among them are gone afterwards: `fork` first to keep them. If it fails or is
        cancelled, the history is as it was (under a policy without recall, what was to go is gone). Pins of
        tokens after the common beginning are taken back.

        Raises InvalidOption for tokens that are not ids of the vocabulary.
        """
        with self._idle():
            ids = token_ids(tokens, self._n_vocab)
            plan = self._match(self._policy.tokens(), ids)
            generator, edited = self._after(plan, ids[plan.prefix :])
            step = self._start(generator)
            self._edited = edited
            return step

    # -- writing on

    def complete(
        self,
        text: str,
        *,
        sampling: SamplingParams | None = None,
        recall: RecallParams | None = None,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
    ) -> Answer:
        """Appends a text as it is, without a chat template, and goes on writing after it. All of the text is
        the query.

        sampling, recall: None: as the engine's options say. max_tokens: -1: no limit.
        stop: texts at which the answer ends, not part of it.
        Raises InputError for a text without a token.
        """
        with self._idle():
            tokens = self._conversation.text_tokens(text, first=not self.n_tokens)
            if not len(tokens):
                raise InputError("the text", "it is empty", hint="Give a text to go on with.")
            request = StepRequest(
                tokens=tokens,
                query_start=0,
                scored=np.ones(len(tokens), np.bool_),
                sampling=self._sampling(sampling),
                max_tokens=max_tokens,
                stop=stop,
                recall=recall,
            )
            return self._start_answer(self._policy.step(request))

    # -- looking

    def search(self, query: str, k: int = 10) -> SearchResult:
        """The `k` blocks that a question with this text would recall first, the best first; nothing is
        appended.

        Raises InvalidOption under a policy without recall; MandatoryTooLarge, Cancelled ... as a step.
        """
        with self._idle():
            if not isinstance(self._policy, KVMem):
                raise InvalidOption(
                    "--policy", self._policy.name, "it has no blocks to search", hint=f"Use {KVMem.name}."
                )
            policy, tokens = self._policy, self._conversation.text_tokens(query, first=False)
            if not len(tokens):
                raise InputError("the search", "it has no text", hint="Give some words.")
            task = self._engine.submit(lambda core: policy.search(tokens, k), resident=policy)
            return task.result()

    def attended(self) -> tuple[AttendedBlock, ...]:
        """The blocks of the view that the newest tokens of the last answer attended to, the most attended
        first.

        Raises InvalidOption under a policy without recall, InputError if the last step was no question or
        its view is there no more; Cancelled ... as a step.
        """
        with self._idle():
            if not isinstance(self._policy, KVMem):
                raise InvalidOption(
                    "--policy", self._policy.name, "it recalls no blocks", hint=f"Use {KVMem.name}."
                )
            answer_start, end = self._conversation.last_answer
            if end != self.n_tokens:
                what, why = "the attention of the last answer", "something was read since"
                raise InputError(what, why, hint="Ask again, then look.")
            policy = self._policy
            task = self._engine.submit(lambda core: policy.attended(answer_start), resident=policy)
            return task.result()

    def history(self) -> I32:
        """Token ids of the finished steps, [n_tokens]."""
        with self._idle():
            return self._policy.tokens()

    def last_message(self) -> ParsedMessage | None:
        """What the newest answer says and what was its reasoning; None if nothing was asked."""
        with self._idle():
            return self._conversation.last_message(self._policy.tokens())

    def turns(self) -> tuple[Turn, ...]:
        """Questions that were asked and their answers, oldest first; texts that were read are no turns."""
        with self._idle():
            return self._conversation.turns(self._policy.tokens())

    def stats(self) -> MemoryStats:
        """Counts and sizes as they are now; also while a step runs."""
        self._refuse_if_closed()
        return self._engine.call(lambda core: self._policy.stats())

    def tiers(self) -> tuple[tuple[int, Tier], ...]:
        """Where the rows of each block are now, by its first token, in history order; also while a step runs.
        Empty under a policy without recall."""
        self._refuse_if_closed()
        policy = self._policy
        return self._engine.call(lambda core: policy.tiers()) if isinstance(policy, KVMem) else ()

    def verify(self) -> Report:
        """Checks every byte that is stored of this workspace and of those it shares blocks with; also while
        a step runs. `is_sound` of the report says whether all is as it was written, `findings` what is not.

        Raises InvalidOption for a workspace that is not stored; StoreError, StoreDamaged where nothing can be
        looked at.
        """
        self._refuse_if_closed()
        if self._opened is None:
            raise InvalidOption(
                "verify", None, "nothing of this workspace is stored", hint="Only one with a name is."
            )
        root = self._engine.shelf.root
        from ..store.repair import verify_family

        return verify_family(root, root.find(self._opened.name).family)

    # -- the history

    def truncate(self, n_tokens: int) -> None:
        """Drops all but the first `n_tokens` tokens. Raises InvalidOption if there are fewer."""
        with self._idle():
            was, n_tokens = self.n_tokens, plain_int("n_tokens", n_tokens)
            if not 0 <= n_tokens <= was:
                raise InvalidOption("n_tokens", n_tokens, f"the history holds {was} tokens")
            self._engine.call(lambda core: self._policy.truncate(n_tokens))
            self._conversation.truncate(self._policy.tokens(), was)

    def fork(self, name: str | None = None) -> Workspace:
        """A workspace of its own with the same history; the two share what neither can change.

        name: of the new one; a durable workspace has durable forks only, others have none.
        Raises InvalidOption, also for one that is read-only, or as WorkspaceEngine.workspace.
        """
        with self._idle():
            if self.read_only:
                raise InvalidOption(
                    "fork", name, f"the workspace {self.name!r} is open read-only",
                    hint="Open it for writing to fork it, or open it read-only once more.",
                )  # fmt: skip
            if self._opened is not None:
                if name is None:
                    raise InvalidOption(
                        "name", None, "the fork of a durable workspace needs one", hint="Give it a name."
                    )
                opened, shelf = self._opened, self._engine.shelf
                return self._engine._on(self._engine.call(lambda core: shelf.fork(opened, name)))
            if name is not None:
                raise InvalidOption(
                    "name", name, "this workspace ends with the engine, so do its forks",
                    hint="Leave the name out, or fork a workspace that has one.",
                )  # fmt: skip
            policy = self._engine.call(lambda core: self._policy.fork())
            return Workspace(self._engine, policy, self._conversation.fork())

    def take_over(self, other: Workspace, n_tokens: int) -> None:
        """The next step of this empty workspace takes over what `other` knows of its first `n_tokens` tokens,
        as far as the step reads the same ones, instead of evaluating them. `other` must stay as it is until
        the step has ended. Nothing happens under a policy without recall.

        Raises WorkspaceClosed, or WorkspaceBusy, for either of the two.
        """
        with self._idle(), other._idle():
            mine, theirs = self._policy, other._policy
            if isinstance(mine, KVMem) and isinstance(theirs, KVMem) and not self.n_tokens:
                self._engine.call(lambda core: mine.take_over(theirs, n_tokens))

    @overload
    def pin(self, span: int, end: int) -> None: ...
    @overload
    def pin(self, span: Span) -> None: ...
    def pin(self, span: int | Span, end: int | None = None) -> None:
        """Keeps the blocks of these tokens in every view from now on.

        span: a range of token positions, (start, end), a block of a recall or of a search, or a turn; or the
        first token, with `end` after the last one.
        Raises InvalidOption for tokens that do not exist, MandatoryTooLarge if the pins leave no room.
        """
        first, last = token_range(span, end)
        with self._idle():
            if not 0 <= first < last <= self.n_tokens:
                raise InvalidOption("pin", f"{first}..{last}", f"the history holds {self.n_tokens} tokens")
            self._engine.call(lambda core: self._policy.pin(first, last))

    @overload
    def unpin(self, span: int, end: int) -> None: ...
    @overload
    def unpin(self, span: Span) -> None: ...
    def unpin(self, span: int | Span, end: int | None = None) -> None:
        """Takes back one `pin` of the same tokens. Raises InvalidOption if there is none."""
        first, last = token_range(span, end)
        with self._idle():
            self._engine.call(lambda core: self._policy.unpin(first, last))

"""The answer of a step whose tokens somebody else chooses, one by one and in their own time."""

from __future__ import annotations

from kvmem_llama.engine.requests import TaskGenerator, Wait
from kvmem_llama.engine.vocab import Vocab
from kvmem_llama.native.layout import F32, I32

from .answering import Answering, Growth
from .link import TaskLink
from .query import Hand, StepRequest
from .report import FinishReason


def answering(vocab: Vocab, link: TaskLink, growth: Growth, request: StepRequest) -> Answering:
    """How the answer to `request` is made."""
    if request.hand is None:
        return Answering(vocab, link, growth, request)
    return AnsweringByHand(vocab, link, growth, request, request.hand)


class AnsweringByHand(Answering):
    """Every token that is chosen is fed, whatever it is; what ends the answer is for the hand to say."""

    def __init__(
        self, vocab: Vocab, link: TaskLink, growth: Growth, request: StepRequest, hand: Hand
    ) -> None:
        super().__init__(vocab, link, growth, request)
        self._hand = hand

    def run(self, history: I32, logits: F32 | None) -> TaskGenerator[FinishReason]:
        """See Answering.run; `max_tokens` and the sampling of the request have no say."""
        hand, link = self._hand, self._link
        while True:
            assert logits is not None
            logits = yield from self._growth.make_room(logits)
            if logits is None:
                self.stop_type = "limit"
                return "length"
            hand.offer(logits)
            yield Wait(hand.has_chosen)
            token = None if link.stop_requested else hand.take()
            if token is None:
                self._text.finish()
                return "stop"
            self._text.push(self._piece(token))
            self.tokens.append(token)
            logits = yield from self._growth.feed(token, logits=True)

"""Reading tokens into the history over the canonical view."""

from __future__ import annotations

from kvmem_llama.engine.requests import Phase, TaskGenerator

from .feeding import feed
from .recompute import as_it_is, reach
from .session import Session


def read_history(session: Session, start: int, end: int) -> TaskGenerator[int]:
    """Makes the tokens start .. end-1 of the history part of it: those that another history has are taken
    over (see carrying), the others are evaluated -> how many were taken over."""
    at, n_carried = start, 0
    carried = session.carried
    for old, first, last in () if carried is None else carried.within(start, end):
        assert carried is not None
        yield from _evaluate(session, at, first)
        for done, lost in carried.take(session.history, session.link, old, first, last):
            n_carried += done
            yield from _evaluate(session, *lost)
        at = last
    yield from _evaluate(session, at, end)
    return n_carried


def _evaluate(session: Session, start: int, end: int) -> TaskGenerator[None]:
    """Evaluates the tokens start .. end-1 of the history; complete blocks are final at once.

    Requests are cut where the canonical view makes room, so what a token attends to does not depend on how
    the tokens came in, nor on the size of batches. With first_pass = current the view of the last step goes
    on until it is full.
    """
    canonical, budget, view = session.canonical, session.budget, session.view
    progress = session.link.progress(Phase.READ, start, end)

    def done(reached: int) -> None:
        session.history.read(reached)
        progress(reached)

    at = start
    while at < end:
        room = session.room(at, budget.n_read)
        if session.settings.first_pass == "current" and view.end == at and room > 0:
            if view.has_refreshed:
                yield from reach(session, as_it_is(session), rebuild=False)
            stop = min(end, at + room)
        else:
            yield from reach(
                session, session.target(canonical.view(at), canonical.epoch_end(at)), rebuild=True
            )
            stop = min(end, canonical.next_room(at))
        yield from feed(session, at, stop, Phase.READ, done=done)
        at = stop

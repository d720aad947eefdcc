"""The one place where a step that does not reach its commit is undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvmem_llama.errors import Cancelled, EngineClosed, StoreError

from .session import Session


@contextmanager
def provisional(session: Session, keep_until: int) -> Iterator[None]:
    """Within: tokens after the last commit are provisional. Any exception drops them and is raised again.

    keep_until: complete blocks that end at or before this token position stay as orphans.
    """
    try:
        yield
    except BaseException as error:
        session.selected = frozenset()
        undo(session, keep_until, error)
        raise


def undo(session: Session, keep_until: int, error: BaseException | None = None) -> None:
    """Back to the last commit. error: what came in between."""
    try:
        # StoreError: whatever could not be read or written, the view knows what its cells hold
        if error is None or isinstance(error, (Cancelled, EngineClosed, GeneratorExit, StoreError)):
            session.view.drop_from(session.history.n_committed)
            session.view.slack.forget(session.history.n_committed)
        else:  # a failed decode, or a defect: the cells may hold something else than the view says
            session.view.clear()
    finally:
        session.history.rollback(keep_until)

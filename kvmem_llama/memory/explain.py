"""What can be said of a block beside its scores."""

from __future__ import annotations

from .report import Tier
from .session import Session


def tier_of(session: Session, start: int) -> Tier:
    """Where the rows of the block at token `start` are now."""
    if start in session.view or session.view.slack.get(start) is not None:
        return "device"
    block = session.history.table.at(start)
    if block is None:  # its rows are being written
        return "host"
    return session.history.store.where(block.ref)

"""What a caller may choose anew for every step about how it recalls."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from kvmem_llama.settings import BY_NAME, Settings


@dataclass(frozen=True, slots=True)
class RecallParams:
    """How one step finds blocks, and what it does with those it found. None: as the engine's option of the
    same name says. What a step leaves in the history's records before its query does not depend on any of
    these, so they may differ from step to step.

    Raises InvalidOption, naming the option, for a value that it cannot have.
    """

    query_long: Literal["ends", "newest"] | None = None  # what is scored of a question longer than n_query
    query_ends: int | None = None  # tokens that "ends" takes of each end
    query_user: int | None = None  # tokens scored of the newest text of a user before a step without any
    stickiness: float | None = None  # 0 .. 1: bonus of the blocks that the last recall selected
    scan_limit: int | None = None  # blocks; of a longer history a coarser score chooses them; 0: no limit
    refresh: int | None = None  # recalled tokens that are evaluated anew in the view; 0: none

    def __post_init__(self) -> None:
        for name, value in self._given().items():
            BY_NAME[name].check(value)

    def over(self, settings: Settings) -> Settings:
        """The engine's settings with what is given here in their place."""
        given = self._given()
        return dataclasses.replace(settings, **given) if given else settings

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

"""Every replica in its turn, whatever its load."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_router.placement.policy import Candidate


class RoundRobin:
    """The plain one."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, candidates: Sequence[Candidate], weight: int) -> int:
        """See Placement."""
        self._turn += 1
        return self._turn % len(candidates)

"""The replica with the least work per row of its batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_router.placement.policy import Candidate


class LeastLoaded:
    """Load as last reported plus what was sent since, over the batch size; ties go in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], weight: int) -> int:
        """See Placement."""
        self._turn += 1
        count = len(candidates)
        order = ((self._turn + i) % count for i in range(count))
        return min(order, key=lambda i: (_load(candidates[i]), candidates[i].in_flight))


def _load(candidate: Candidate) -> float:
    load = candidate.load
    return (load.running + load.waiting + candidate.submitted_since_load) / load.max_num_seqs

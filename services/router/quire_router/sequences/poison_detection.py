"""Poison-request detection: which of the engines that a sequence has lost are held against it, and when they are too
many.

An engine that broke while the sequence ran there may have broken of it, of another that ran there too, or of a fault
that has nothing to do with either. An engine counts where it failed as the last one did (`Outage.kind`) and where most
of those that ran beside the sequence have gone on since: then the fault goes with this sequence. An engine that only
could not be heard, and is back in the same epoch, had not broken at all; one where the sequence only waited hardly
broke of it. Nothing is passed on for ever: engines that do not count end the sequence too, when they are several times
as many. Knows no replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire_common.errors import Internal, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit.hello import Epoch
    from quire_common.errors import QuireError
    from quire_router.sequences.engine_failure import EngineFailure, Outage, Progress

# Times the limit: engines that broke and do not count, and engines that had not broken or where the sequence waited.
_UNRELATED_FACTOR, _SPARED_FACTOR = 3, 10


class _Suspected(NamedTuple):
    instance: str
    epoch: Epoch | None
    outage: Outage


class PoisonDetector:
    """Of one sequence, since its last token."""

    __slots__ = ("_spared", "_suspected")

    def __init__(self) -> None:
        self._suspected: list[_Suspected] = []
        self._spared = 0

    def clear(self) -> None:
        """Forget all lost engines, since a token has come."""
        self._suspected.clear()
        self._spared = 0

    def verdict(
        self,
        sequence: Progress,
        failure: EngineFailure,
        epoch: Epoch | None,
        still_runs: Callable[[str, Epoch], bool],
        limit: int,
    ) -> QuireError | None:
        """Record that the sequence has lost another engine, which was in `epoch`. Returns the error that ends the
        sequence, or None if it may be passed on. `still_runs` says whether an instance is within reach in that
        epoch."""
        if not failure.suspect and not failure.bystander:
            return None
        broken = list[_Suspected]()
        for one in self._suspected:
            # To be lost again it must have been there.
            lost_again = (one.instance, one.epoch) == (failure.instance, epoch)
            alive = one.epoch is not None and (still_runs(one.instance, one.epoch) or lost_again)
            self._spared += alive
            if not alive:
                broken.append(one)
        self._suspected = broken
        if failure.bystander:
            self._spared += 1
            return _spared_too_often(self._spared) if self._spared >= limit * _SPARED_FACTOR else None
        # What ran beside it has had no time to go on since this last one.
        kind = failure.outage.kind
        alike = 1 + sum(one.outage.kind == kind and one.outage.most_progressed(sequence) for one in broken)
        broken.append(_Suspected(failure.instance, epoch if failure.unreachable else None, failure.outage))
        if alike >= limit or len(broken) >= limit * _UNRELATED_FACTOR:
            # Of an engine that went away nothing better is known; one that lives has said what is wrong.
            return _too_many_attempts(len(broken)) if isinstance(failure.error, Unavailable) else failure.error
        return _spared_too_often(self._spared) if self._spared >= limit * _SPARED_FACTOR else None


def _too_many_attempts(attempts: int) -> Internal:
    """Make the error for a request that has lost too many engines while it ran there."""
    return Internal(
        "MIGRATION_LIMIT",
        f"{attempts} engines in a row were lost while they ran this request, and none gave a token.",
        "Do not send it again as it is: report it with its request id.",
    )


def _spared_too_often(attempts: int) -> Internal:
    """Make the error for a request whose engines were lost too often while it only waited there, or were only out of
    reach."""
    return Internal(
        "MIGRATION_LIMIT",
        f"{attempts} engines were lost in a row while this request waited in their queues, or were out of reach for a "
        "while; none gave a token.",
        "Retry once the engines stay up; see the router's log for what became of them.",
    )

"""Poison-request detection: decides which of the lost engines count against a sequence, and when they are too many.

If an engine broke while the sequence ran there, the cause may be this sequence, another sequence, or an unrelated
fault. A lost engine counts against the sequence under two conditions. It failed in the same way as the engine that was
lost last (`Outage.kind`). And at least half of the other sequences that ran there have got tokens since, so the fault
seems to follow this sequence. The engine that was lost just now counts without the second condition.

Other lost engines do not count. An engine that was only unreachable, and comes back in the same epoch, had not broken.
If the sequence only waited at an engine, it has hardly caused the failure. But a sequence does not move from engine to
engine for ever: it also fails after several times as many lost engines that do not count. This module knows no
replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire_common.errors import Internal, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit.hello import Epoch
    from quire_common.errors import QuireError
    from quire_router.sequences.engine_failure import EngineFailure, Outage, Progress

# The limit is multiplied by the first factor for all engines that broke, whether they count or not, and by the second
# factor for engines that had not broken or where the sequence only waited.
_UNRELATED_FACTOR, _SPARED_FACTOR = 3, 10


class _Suspected(NamedTuple):
    instance: str
    epoch: Epoch | None
    outage: Outage


class PoisonDetector:
    """The engines that one sequence has lost since its last token."""

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
        sequence, or None if the sequence may go to another engine. Failures that are neither `suspect` nor `bystander`
        are ignored.

        The error comes after `limit` losses of the same kind as this one, after which at least half of the other
        sequences went on; this loss always counts. It also comes after three times as many losses of any kind. In both
        cases it is the failure's own error, or MIGRATION_LIMIT if that is Unavailable. Two kinds of losses share
        another count: engines where the sequence only waited, and earlier `unreachable` engines that had not broken.
        After ten times `limit` of these, the error is always MIGRATION_LIMIT. Engines that had not broken still run in
        their epoch (`still_runs`) or are lost again in it now.
        """
        if not failure.suspect and not failure.bystander:
            return None
        broken = list[_Suspected]()
        for one in self._suspected:
            # An engine that is lost a second time in the same epoch had not broken the first time.
            lost_again = (one.instance, one.epoch) == (failure.instance, epoch)
            alive = one.epoch is not None and (still_runs(one.instance, one.epoch) or lost_again)
            self._spared += alive
            if not alive:
                broken.append(one)
        self._suspected = broken
        if failure.bystander:
            self._spared += 1
            return _spared_too_often(self._spared) if self._spared >= limit * _SPARED_FACTOR else None
        # The last engine always counts, because the other sequences there had no time to get tokens since.
        kind = failure.outage.kind
        alike = 1 + sum(one.outage.kind == kind and one.outage.most_progressed(sequence) for one in broken)
        broken.append(_Suspected(failure.instance, epoch if failure.unreachable else None, failure.outage))
        if alike >= limit or len(broken) >= limit * _UNRELATED_FACTOR:
            # An Unavailable does not say why the engine went away. Any other error names the cause, so it is returned.
            return _too_many_attempts(len(broken)) if isinstance(failure.error, Unavailable) else failure.error
        return _spared_too_often(self._spared) if self._spared >= limit * _SPARED_FACTOR else None


def _too_many_attempts(attempts: int) -> Internal:
    """Make the error (Internal, MIGRATION_LIMIT) for a request that has lost too many engines in a row while it ran
    there."""
    return Internal(
        "MIGRATION_LIMIT",
        f"{attempts} engines in a row were lost while they ran this request, and none gave a token.",
        "Do not send it again as it is: report it with its request id.",
    )


def _spared_too_often(attempts: int) -> Internal:
    """Make the error (Internal, MIGRATION_LIMIT) for a request whose engines were lost too often while it only waited
    there, or were only out of reach."""
    return Internal(
        "MIGRATION_LIMIT",
        f"{attempts} engines were lost in a row while this request waited in their queues, or were out of reach for a "
        "while; none gave a token.",
        "Retry once the engines stay up; see the router's log for what became of them.",
    )

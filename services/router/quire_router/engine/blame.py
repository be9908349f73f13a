"""Blame: which of the engines that a choice has lost are held against it, and when those are too many.

An engine that broke while the choice ran there may have broken of it. One that only could not be heard, and is back in
the same epoch, had not broken at all; one where the choice only waited hardly broke of it. Both are held against it
ten times less: a submit alone may break a scheduler, and nothing is passed on for ever. Knows no replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import Internal, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit.hello import Epoch
    from quire_common.errors import QuireError
    from quire_router.engine.loss import Loss

_SPARED_FACTOR = 10


class Blame:
    """Of one choice, since its last token."""

    __slots__ = ("_spared", "_suspected")

    def __init__(self) -> None:
        self._suspected: list[tuple[str, Epoch | None]] = []
        self._spared = 0

    def clear(self) -> None:
        """A token has come."""
        self._suspected.clear()
        self._spared = 0

    def verdict(
        self, loss: Loss, epoch: Epoch | None, goes_on: Callable[[str, Epoch], bool], limit: int
    ) -> QuireError | None:
        """Another engine is lost, which was in that epoch: why the choice is passed on no more, or None. `goes_on`
        tells whether an instance is there again in the same epoch."""
        if not loss.suspect and not loss.bystander:
            return None
        broken = []
        for instance, seen in self._suspected:
            # To be lost again it must have been there.
            alive = seen is not None and (goes_on(instance, seen) or (instance, seen) == (loss.instance, epoch))
            self._spared += alive
            if not alive:
                broken.append((instance, seen))
        self._suspected = broken
        if loss.bystander:
            self._spared += 1
        else:
            broken.append((loss.instance, epoch if loss.unheard else None))
        if len(broken) >= limit:
            # Of an engine that went away nothing better is known; one that lives has said what is wrong.
            return _too_many_attempts(len(broken)) if isinstance(loss.error, Unavailable) else loss.error
        return _spared_too_often(self._spared) if self._spared >= limit * _SPARED_FACTOR else None


def _too_many_attempts(attempts: int) -> Internal:
    return Internal(
        "MIGRATION_LIMIT",
        f"{attempts} engines in a row were lost while they ran this request, and none gave a token.",
        "Do not send it again as it is: report it with its request id.",
    )


def _spared_too_often(attempts: int) -> Internal:
    return Internal(
        "MIGRATION_LIMIT",
        f"{attempts} engines were lost in a row while this request waited in their queues, or were out of reach for a "
        "while; none gave a token.",
        "Retry once the engines stay up; see the router's log for what became of them.",
    )

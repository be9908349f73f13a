"""DeltaQueue: sequences of a job that have new output for the job's one consumer.

A slow consumer finds a sequence's new output joined, not queued: memory is bounded by the answer itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.errors import QuireError


class Queued(Protocol):
    """A sequence of a job. `dirty`: it is in the queue."""

    dirty: bool


QueuedT = TypeVar("QueuedT", bound=Queued)


class DeltaQueue(Generic[QueuedT]):
    """One per job; one consumer, that awaits `take`, or has itself called and then takes with `take_now`.

    `error` ends it, after the news that came before.
    """

    __slots__ = ("_dirty", "_listener", "_waiter", "error")

    def __init__(self) -> None:
        self._dirty: list[QueuedT] = []
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self.error: QuireError | None = None

    def touch(self, sequence: QueuedT) -> None:
        """The choice has news."""
        if not sequence.dirty:
            sequence.dirty = True
            self._dirty.append(sequence)
            if self._waiter is not None or self._listener is not None:
                self._wake()

    def fail(self, error: QuireError) -> None:
        """End the job; the first error counts."""
        if self.error is None:
            self.error = error
            self._wake()

    async def take(self) -> list[QueuedT]:
        """The choices with news, at least one; raises what `fail` was told once there are none."""
        while not self._dirty:
            if self.error is not None:
                raise self.error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.take_now()

    def take_now(self) -> list[QueuedT]:
        """The choices with news, perhaps none."""
        dirty, self._dirty = self._dirty, []
        for sequence in dirty:
            sequence.dirty = False
        return dirty

    def call_once(self, listener: Callable[[], None]) -> None:
        """Call it once in the loop's next turn after there are news, or an error: what comes together is told together,
        and costs no task to wake."""
        self._listener = listener
        if self._dirty or self.error is not None:
            self._wake()

    def _wake(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().call_soon(listener)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

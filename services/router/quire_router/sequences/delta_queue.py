"""DeltaQueue: sequences of a job that have new output for the job's one consumer.

A slow consumer finds a sequence's new output joined, not queued: memory is bounded by the answer itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.errors import QuireError


class Queued(Protocol):
    """A sequence of a job. The queue alone writes `queued`."""

    queued: bool


QueuedT = TypeVar("QueuedT", bound=Queued)


class DeltaQueue(Generic[QueuedT]):
    """The sequences of one job that have new output. The one consumer awaits `wait`, or passes a listener to
    `call_when_ready`; then it calls `take_sequences`.

    `error` is the error that ends the job; the consumer gets it after all output that came before.
    """

    __slots__ = ("_listener", "_ready", "_waiter", "error")

    def __init__(self) -> None:
        self._ready: list[QueuedT] = []
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self.error: QuireError | None = None

    def add(self, sequence: QueuedT) -> None:
        """Queue a sequence that has new output or has ended, unless it is queued already; wake the consumer."""
        if not sequence.queued:
            sequence.queued = True
            self._ready.append(sequence)
            if self._waiter is not None or self._listener is not None:
                self._wake()

    def fail(self, error: QuireError) -> None:
        """End the job with this error and wake the consumer; the first error counts."""
        if self.error is None:
            self.error = error
            self._wake()

    def drop(self) -> None:
        """Empty the queue, because the consumer does not want its output any more."""
        self.take_sequences()

    async def wait(self) -> None:
        """Return when a sequence is queued. Raises the error of `fail` when no sequence is queued."""
        while not self._ready:
            if self.error is not None:
                raise self.error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take_sequences(self) -> list[QueuedT]:
        """Return the queued sequences, perhaps none, and empty the queue."""
        ready, self._ready = self._ready, []
        for sequence in ready:
            sequence.queued = False
        return ready

    def call_when_ready(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, in the event loop's next turn after output or an error came, also if either is there
        already. So the consumer takes all output of one turn together, and no task has to be woken."""
        self._listener = listener
        if self._ready or self.error is not None:
            self._wake()

    def _wake(self) -> None:
        """Schedule the listener and wake the coroutine in `wait`, if there are any; each is then forgotten."""
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().call_soon(listener)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

"""EventQueue: a bounded queue of the KV events that one subscriber has not taken yet. A subscriber that is too slow
loses its subscription.

The task that fills the queue must not wait for a subscriber, because it reads the scheduler's events for all
subscribers. This module knows nothing of protobuf but the size of a message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from quire_common.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

MOST_BYTES = 32 << 20


class Sized(Protocol):
    """A message."""

    def ByteSize(self) -> int:  # noqa: N802  # protobuf's name
        """Return the size on the wire."""


M = TypeVar("M", bound=Sized)


class EventQueue(Generic[M]):
    """The queue of one subscriber, which holds at most `most_bytes`, or a single longer message. Only the event loop
    uses it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[M, int]] = deque()
        self._bytes = 0
        self._news = asyncio.Event()
        self._over = False

    async def fill(self, source: AsyncGenerator[M, None]) -> None:
        """Queue the messages of `source` until it ends. Then, and also after an error or a cancellation, close `source`
        and let `messages` end. If the queued messages would exceed `most_bytes`, drops all of them and raises
        Overloaded; a message that waits alone may have any size. Errors of `source` pass on."""
        try:
            async with contextlib.aclosing(source):
                async for message in source:
                    self._put(message)
        finally:
            self._over = True
            self._news.set()

    async def messages(self) -> AsyncIterator[M]:
        """Yield the messages in order, until `fill` has ended and the queue is empty. An error of `fill` is not raised
        here."""
        while self._waiting or not self._over:
            if not self._waiting:
                self._news.clear()
                await self._news.wait()
                continue
            message, size = self._waiting.popleft()
            self._bytes -= size
            yield message

    def _put(self, message: M) -> None:
        """Append a message and wake the reader. Raises Overloaded, and drops all queued messages, if others wait and
        the sum would exceed the bound. A message that waits alone may have any size."""
        size = message.ByteSize()
        if self._waiting and self._bytes + size > self._most_bytes:
            waited, held = len(self._waiting), self._bytes
            self._waiting.clear()
            raise Overloaded(
                "SUBSCRIBER_TOO_SLOW",
                f"{waited} batches of {held} bytes waited for this subscriber, and more came.",
                "Take events as they come; subscribe again, and begin with a snapshot.",
            )
        self._waiting.append((message, size))
        self._bytes += size
        self._news.set()

"""StreamLimiter: limits the number of Put and Get streams, and the time of each.

Every stream holds a thread of the server. Without limits, peers that stall would take all threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from quire_common.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import grpc


class StreamLimiter:
    """Allows `limit` streams at once, and cancels a stream at the first `sweep` after `timeout_s`."""

    def __init__(self, limit: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._running: dict[grpc.ServicerContext, float] = {}

    def __len__(self) -> int:
        return len(self._running)

    @contextlib.contextmanager
    def track(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Context manager around a stream's handler: the stream is counted, and `sweep` may cancel it after
        `timeout_s`. Raises Overloaded if `limit` streams run already."""
        with self._lock:
            if len(self._running) >= self._limit:
                raise Overloaded(
                    "TOO_MANY_TRANSFERS",
                    f"{self._limit} transfers of pages are under way.",
                    "Treat it as a miss, or retry.",
                    retry_after_s=0.1,
                )
            self._running[context] = self._clock() + self._timeout_s
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(context, None)
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until no stream is under way, but for `timeout_s` at most. Running streams are not cancelled."""
        with self._lock:
            self._changed.wait_for(lambda: not self._running, timeout_s)

    def sweep(self) -> None:
        """Cancel the calls of streams that have run for `timeout_s`; their handlers end by themselves. Called now and
        then."""
        now = self._clock()
        with self._lock:
            late = [context for context, deadline_s in self._running.items() if deadline_s <= now]
        for context in late:
            context.cancel()

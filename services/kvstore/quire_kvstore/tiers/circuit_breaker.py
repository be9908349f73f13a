"""A circuit breaker: who keeps failing is left alone for a while, then tried once. Thread-safe."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class CircuitBreaker:
    """Opens with a failure. After `retry_s` it is half open: `allow` lets one caller through, whose outcome decides."""

    def __init__(self, retry_s: float, *, is_open: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry_s = retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._retry_at_s: float | None = clock() if is_open else None

    @property
    def closed(self) -> bool:
        """Whether all is well."""
        return self._retry_at_s is None

    def allow(self) -> bool:
        """Whether to try. While open, True once per `retry_s`: the probe, whose outcome must be told."""
        with self._lock:
            if self._retry_at_s is None:
                return True
            now = self._clock()
            if now < self._retry_at_s:
                return False
            self._retry_at_s = now + self._retry_s
            return True

    def succeeded(self) -> bool:
        """It went well; returns whether the breaker was open."""
        with self._lock:
            was_open, self._retry_at_s = self._retry_at_s is not None, None
            return was_open

    def failed(self) -> bool:
        """It did not; returns whether the breaker was closed."""
        with self._lock:
            was_closed = self._retry_at_s is None
            self._retry_at_s = self._clock() + self._retry_s
            return was_closed

"""CircuitBreaker: stops calls to something that fails, and lets one call through after a pause."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from quire_common.telemetry.metrics import gauge

if TYPE_CHECKING:
    from collections.abc import Callable

_open_gauge = gauge(
    "quire_circuit_breaker_open", "1: calls are not made, since they failed; 0: they are.", ("breaker",)
)


class CircuitBreaker:
    """Opens after `max_failures` failures in a row. After each pause, one caller may try; this try is the probe. If the
    probe fails, the pause doubles, up to `max_pause_s`. The breaker does not know what its callers try. Thread-safe."""

    def __init__(
        self,
        first_pause_s: float = 1.0,
        max_pause_s: float = 30.0,
        *,
        max_failures: int = 3,
        is_open: bool = False,
        clock: Callable[[], float] = time.monotonic,
        name: str = "",
    ) -> None:
        """`is_open`: the breaker begins open, and a probe may follow at once. `name` is the breaker's label in metrics;
        without a name, there is no metric. If two breakers have one name, the metric shows the last change of
        either."""
        self._first_pause_s = self._pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._max_failures = max_failures
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = max_failures if is_open else 0
        self._retry_at_s = clock() if is_open else 0.0
        self._is_probing = False
        self._state = _open_gauge.labels(name) if name else None
        self._show()

    @property
    def closed(self) -> bool:
        """Whether the breaker is closed: fewer than `max_failures` tries in a row have failed."""
        return self._failures < self._max_failures

    def can_try(self) -> bool:
        """Return whether a caller may try now: the breaker is closed, or the pause is over. The pause begins when the
        breaker opens, and anew when a probe begins or fails."""
        return self.closed or self._clock() >= self._retry_at_s

    def begin_try(self) -> None:
        """Note that a caller tries. While the breaker is open, this try is the probe, and no other caller may try
        before another pause is over."""
        with self._lock:
            self._begin_try()

    def try_now(self) -> bool:
        """Return `can_try` and, where that is True, begin the try: while the breaker is open, one caller per pause gets
        True."""
        with self._lock:
            can_try = self.can_try()
            if can_try:
                self._begin_try()
            return can_try

    def succeeded(self) -> bool:
        """Note that a try went well, which closes the breaker and resets the pause. A named breaker shows that in its
        metric. Returns whether the breaker was open."""
        with self._lock:
            was_open = not self.closed
            self._failures, self._pause_s, self._is_probing = 0, self._first_pause_s, False
            if was_open:
                self._show()
            return was_open

    def failed(self) -> bool:
        """Note that a try failed: `max_failures` in a row open the breaker for the pause, and a probe that fails
        doubles the pause, up to its maximum, and begins it anew. The first failure after a probe has begun counts as
        that of the probe, whoever tried. Any other failure while the breaker is open prolongs nothing. A failure of a
        closed breaker sets the metric. Returns whether the breaker was closed before."""
        with self._lock:
            was_closed = self.closed
            self._failures += 1
            if self._is_probing:
                self._pause_s = min(2 * self._pause_s, self._max_pause_s)
            if self._is_probing or self._failures == self._max_failures:
                self._retry_at_s = self._clock() + self._pause_s
            self._is_probing = False
            if was_closed:
                self._show()
            return was_closed

    def _show(self) -> None:
        if self._state is not None:
            self._state.set(not self.closed)

    def _begin_try(self) -> None:
        if not self.closed:
            self._retry_at_s, self._is_probing = self._clock() + self._pause_s, True

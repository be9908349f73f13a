"""The scheduler's one clock: seconds since the Unix epoch that never jump while the process lives."""

from __future__ import annotations

import time

_OFFSET_S = time.time() - time.monotonic()


def now_s() -> float:
    """Seconds since the Unix epoch, advanced by the monotonic clock."""
    return _OFFSET_S + time.monotonic()


def from_monotonic(monotonic_s: float) -> float:
    """A reading of `time.monotonic()` on this clock; infinity stays infinity."""
    return _OFFSET_S + monotonic_s

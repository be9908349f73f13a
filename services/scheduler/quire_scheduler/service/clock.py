"""The scheduler's only clock: seconds since the Unix epoch. It never jumps while the process lives."""

from __future__ import annotations

import time

_OFFSET_S = time.time() - time.monotonic()


def now_s() -> float:
    """Return the seconds since the Unix epoch, advanced by the monotonic clock."""
    return _OFFSET_S + time.monotonic()


def from_monotonic(monotonic_s: float) -> float:
    """Convert a reading of `time.monotonic()` to this clock; infinity stays infinity."""
    return _OFFSET_S + monotonic_s

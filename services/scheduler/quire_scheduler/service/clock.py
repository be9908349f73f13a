"""The scheduler's one clock: seconds since the Unix epoch that never jump while the process lives."""

from __future__ import annotations

import time

_OFFSET_S = time.time() - time.monotonic()


def now_s() -> float:
    """Seconds since the Unix epoch, advanced by the monotonic clock."""
    return _OFFSET_S + time.monotonic()


def from_unix_ms(unix_ms: int) -> float:
    """A peer's point in time, on this clock. It is as far from now as the wall clock says, which may have been set
    since the process started."""
    return now_s() + unix_ms / 1000 - time.time()

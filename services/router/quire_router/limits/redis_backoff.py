"""Leaves a Redis that failed alone for a second, so that requests do not wait for it. All limits of a router share one
backoff: a request that has several limits waits for a hung Redis once."""

from __future__ import annotations

import time

from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.redis_state import note_redis
from quire_router import metrics

BACKOFF_S = 1.0
log = get_logger(__name__)


class RedisBackoff:
    """One per process."""

    def __init__(self) -> None:
        self._until_s = 0.0

    @property
    def left_s(self) -> float:
        """How long Redis is still left alone; 0.0 where it may be asked."""
        return max(0.0, self._until_s - time.monotonic())

    def begin(self, error: BaseException) -> None:
        """Leave Redis alone from now on, after this failure. Logs the first failure."""
        if not self.left_s:
            log.warning("limits are local: Redis does not answer", error=type(error).__name__)
        self._until_s = time.monotonic() + BACKOFF_S
        metrics.limits_shared.set(0)
        note_redis("limits", answered=False)

    def answered(self) -> None:
        """Note that Redis has answered."""
        metrics.limits_shared.set(1)
        note_redis("limits", answered=True)

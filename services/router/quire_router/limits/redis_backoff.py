"""After a failure of Redis, the router does not call Redis for a second, so that requests do not wait for it. All
limits of a router share one backoff. So a request that has several limits waits for a hung Redis only once."""

from __future__ import annotations

import time

from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.redis_state import note_redis
from quire_router import metrics

BACKOFF_S = 1.0
log = get_logger(__name__)


class RedisBackoff:
    """The time until which Redis is not called. One per process."""

    def __init__(self) -> None:
        self._until_s = 0.0

    @property
    def left_s(self) -> float:
        """The seconds for which Redis is not to be called; 0.0 if it may be called now."""
        return max(0.0, self._until_s - time.monotonic())

    def begin(self, error: BaseException) -> None:
        """Do not call Redis for a second from now. Logs the failure, unless a backoff was running, and shows in the
        metrics and in the Redis state that the limits are local."""
        if not self.left_s:
            log.warning("limits are local: Redis does not answer", error=type(error).__name__)
        self._until_s = time.monotonic() + BACKOFF_S
        metrics.limits_shared.set(0)
        note_redis("limits", answered=False)

    def answered(self) -> None:
        """Show in the metrics and in the Redis state that Redis has answered, so the limits are shared. A running
        backoff goes on."""
        metrics.limits_shared.set(1)
        note_redis("limits", answered=True)

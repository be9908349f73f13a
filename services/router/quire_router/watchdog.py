"""Watchdog: notices peers that fall silent. gRPC itself answers HTTP/2 pings, even while the program behind it hangs,
so pings do not suffice.

Silence counts only while this process was awake. A tick that comes late adds at most twice its normal time. So a stall
of this process's own event loop does not count as silence of the peer. This module knows nothing of the watched peers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

_TICKS_PER_LIMIT = 8
_MAX_TICK_S = 0.25
_MIN_TICK_S = 0.01
log = get_logger(__name__)


class Watch:
    """One peer, and the time for which it has been silent."""

    __slots__ = ("_on_expiry", "_owes", "expired", "limit_s", "quiet_s")

    def __init__(self, limit_s: float, on_expiry: Callable[[], None], owes: Callable[[], bool] | None) -> None:
        self.limit_s = limit_s
        self.quiet_s = 0.0
        self.expired = False
        self._on_expiry = on_expiry
        self._owes = owes

    def hear(self) -> None:
        """Begin to count silence again, because the peer gave a sign of life."""
        self.quiet_s = 0.0

    def set_limit(self, limit_s: float) -> None:
        """Set how long the peer may be silent from now on."""
        self.limit_s = limit_s

    def advance(self, passed_s: float) -> None:
        """Count time that has passed. At the limit, call `on_expiry`, once. While the peer owes nothing, silence stays
        at 0."""
        if self._owes is not None and not self._owes():
            self.quiet_s = 0.0
            return
        self.quiet_s += passed_s
        if self.quiet_s >= self.limit_s and not self.expired:
            self.expired = True
            self._on_expiry()


class Watchdog:
    """All watches of the process, on one timer that `run` keeps. A tick is an eighth of the shortest of `limits_s`, but
    at least 0.01 s and at most 0.25 s."""

    def __init__(self, *limits_s: float) -> None:
        self.tick_s = min(_MAX_TICK_S, max(_MIN_TICK_S, min(limits_s) / _TICKS_PER_LIMIT))
        self._watches: dict[Watch, None] = {}

    def watch(self, limit_s: float, on_expiry: Callable[[], None], owes: Callable[[], bool] | None = None) -> Watch:
        """Watch a peer until `drop`. `on_expiry` is called once, when the peer was silent for `limit_s`. With `owes`,
        time counts only while `owes` returns True. `run` calls both, and logs an exception of either."""
        watch = Watch(limit_s, on_expiry, owes)
        self._watches[watch] = None
        return watch

    def drop(self, watch: Watch) -> None:
        """Stop watching the peer: `run` no longer calls `on_expiry`. Idempotent."""
        self._watches.pop(watch, None)

    async def run(self) -> None:
        """Advance all watches, tick by tick, until cancelled. A tick that comes late counts as at most two. If one
        watch raises, `run` logs this and goes on."""
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            await asyncio.sleep(self.tick_s)
            now_s = loop.time()
            passed_s, last_s = min(now_s - last_s, 2 * self.tick_s), now_s
            for watch in list(self._watches):
                # The expiry of another watch in this tick may have dropped this one.
                if watch not in self._watches:
                    continue
                try:
                    watch.advance(passed_s)
                except Exception:
                    log.exception("the watchdog could not handle a watched peer")

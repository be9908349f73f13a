"""Notices peers that fall silent: HTTP/2 pings are answered by gRPC itself, also while the program above it hangs.

Silence counts only while this process was awake: a tick that comes late adds no more than one that is twice as long as
it should be, so a stall of our own event loop is not taken for the peer's. Knows nothing of what is watched.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_TICKS_PER_LIMIT = 8
_MAX_TICK_S = 0.25
_MIN_TICK_S = 0.01


class Watch:
    """One peer, and how long it has been silent."""

    __slots__ = ("_on_expiry", "_owes", "expired", "limit_s", "quiet_s")

    def __init__(self, limit_s: float, on_expiry: Callable[[], None], owes: Callable[[], bool] | None) -> None:
        self.limit_s = limit_s
        self.quiet_s = 0.0
        self.expired = False
        self._on_expiry = on_expiry
        self._owes = owes

    def hear(self) -> None:
        """Begin to count silence anew: the peer gave a sign of life."""
        self.quiet_s = 0.0

    def set_limit(self, limit_s: float) -> None:
        """Set how long the peer may be silent from now on."""
        self.limit_s = limit_s

    def advance(self, passed_s: float) -> None:
        """Count time that has passed; once the limit is reached, call `on_expiry`, once. While the peer owes nothing,
        silence stays at 0."""
        if self._owes is not None and not self._owes():
            self.quiet_s = 0.0
            return
        self.quiet_s += passed_s
        if self.quiet_s >= self.limit_s and not self.expired:
            self.expired = True
            self._on_expiry()


class Watchdog:
    """All watches of the process, on one timer that `run` keeps."""

    def __init__(self, *limits_s: float) -> None:
        self.tick_s = min(_MAX_TICK_S, max(_MIN_TICK_S, min(limits_s) / _TICKS_PER_LIMIT))
        self._watches: dict[Watch, None] = {}

    def watch(self, limit_s: float, on_expiry: Callable[[], None], owes: Callable[[], bool] | None = None) -> Watch:
        """Watch a peer until `drop`; `on_expiry` is called once it was silent for `limit_s`. With `owes`, time counts
        only while that returns True."""
        watch = Watch(limit_s, on_expiry, owes)
        self._watches[watch] = None
        return watch

    def drop(self, watch: Watch) -> None:
        """Watch it no longer. Idempotent."""
        self._watches.pop(watch, None)

    async def run(self) -> None:
        """Advance all watches, tick by tick, until cancelled. A tick that comes late counts as two at most."""
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            await asyncio.sleep(self.tick_s)
            now_s = loop.time()
            passed_s, last_s = min(now_s - last_s, 2 * self.tick_s), now_s
            for watch in list(self._watches):
                watch.advance(passed_s)

"""The console's event stream: one snapshot per second, shared by all watchers. A watcher's key needs the scope `admin`.

A watcher is one open console. The number of watchers and the size and rate of snapshots are bounded. A slow watcher
gets only the newest snapshot. A watcher that reads nothing for STALL_S is dropped. Without watchers, the router makes
no snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from quire_common.errors import Overloaded
from quire_common.telemetry.audit import BEGUN, audit, bind_key_name
from quire_common.telemetry.logs import get_logger
from quire_router import metrics
from quire_router.front.http.admin_guard import check_administrator
from quire_router.front.http.exchange import exchange_of
from quire_router.front.http.protocol import chunk_writer
from quire_router.principal import ADMIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from quire_router.api_keys import ApiKeys
    from quire_router.front.http.console.snapshot import Snapshots
    from quire_router.front.http.console.tier_stats_client import TierStatsClient

EVENTS_PATH = "/console/events"
MOST_WATCHERS = 8
INTERVAL_S = 1.0
STALL_S = 10.0
_RETRY_AFTER_S = 5.0
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
)
log = get_logger(__name__)


class _Watcher:
    """One stream, with the newest snapshot that it has not sent yet."""

    def __init__(self, authorization: str) -> None:
        self.authorization = authorization
        self.closed = False
        self._frame = b""
        self._news = asyncio.Event()

    def offer(self, frame: bytes) -> None:
        """Replace the waiting snapshot."""
        self._frame = frame
        self._news.set()

    def close(self) -> None:
        """End the stream."""
        self.closed = True
        self._news.set()

    async def next_frame(self) -> bytes:
        """Wait for a snapshot and take it; empty: the stream must end."""
        await self._news.wait()
        self._news.clear()
        frame, self._frame = self._frame, b""
        return b"" if self.closed else frame


class ConsoleEvents:
    """An ASGI endpoint. Calls `watched` with True when a first watcher starts the task that makes snapshots, and with
    False when this task ends, up to a round after the last watcher has left."""

    def __init__(
        self,
        snapshots: Snapshots,
        stores: TierStatsClient,
        keys: ApiKeys,
        watched: Callable[[bool], None],
        interval_s: float = INTERVAL_S,
        stall_s: float = STALL_S,
    ) -> None:
        self._snapshots = snapshots
        self._stores = stores
        self._keys = keys
        self._watched = watched
        self._interval_s = interval_s
        self._stall_s = stall_s
        self._watchers: set[_Watcher] = set()
        self._last = b""
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send snapshots until the client leaves, its key loses the scope, the client reads nothing for `stall_s`, a
        snapshot cannot be made, or `close` is called. A HEAD request gets the head alone. The audit log records the
        beginning. Raises PermissionDenied as `check_administrator` does, and Overloaded if 8 consoles watch already."""
        check_administrator(HTTPConnection(scope), self._keys, own_name=True)
        if len(self._watchers) >= MOST_WATCHERS:
            raise Overloaded(
                "CONSOLE_FULL",
                f"{MOST_WATCHERS} consoles are open at this router.",
                "Close one of them.",
                retry_after_s=_RETRY_AFTER_S,
            )
        authorization = exchange_of(scope).authorization
        bind_key_name(self._keys.name_of(authorization))
        audit(f"GET {EVENTS_PATH}", BEGUN, peer=str((scope.get("client") or ("",))[0]))
        watcher = _Watcher(authorization)
        self._enter(watcher)
        leaving = asyncio.create_task(_close_when_gone(receive, watcher))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            if scope["method"] == "HEAD":
                watcher.close()
            await self._send_frames(watcher, scope, send)
        finally:
            self._leave(watcher)
            leaving.cancel()

    async def close(self) -> None:
        """End all streams, and wait until the task that makes snapshots has ended."""
        for watcher in self._watchers:
            watcher.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _send_frames(self, watcher: _Watcher, scope: Scope, send: Send) -> None:
        """Send each snapshot as it comes, until the watcher is closed; then end the answer, for which the client also
        has `stall_s`. If the client does not take a snapshot for `stall_s`, count and log this, and abort its
        connection."""
        connection = chunk_writer(scope)
        try:
            while frame := await watcher.next_frame():
                async with asyncio.timeout(self._stall_s):
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
        except TimeoutError:
            metrics.console_dropped.inc()
            log.warning("a console that reads too slowly was dropped")
            if connection is not None:
                connection.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": b""})

    def _enter(self, watcher: _Watcher) -> None:
        """Add a watcher. If no task makes snapshots, start one and call `watched` with True; else offer the watcher the
        last snapshot at once, if there is one."""
        self._watchers.add(watcher)
        metrics.console_watchers.set(len(self._watchers))
        if self._task is None:
            self._watched(True)
            self._task = asyncio.create_task(self._run(), name="console")
        elif self._last:
            watcher.offer(self._last)

    def _leave(self, watcher: _Watcher) -> None:
        """Remove a watcher. The task ends by itself when no watcher is left."""
        self._watchers.discard(watcher)
        metrics.console_watchers.set(len(self._watchers))

    async def _run(self) -> None:
        """Every `interval_s` seconds, or when all kvstores have answered if that takes longer, ask the kvstores for
        statistics, close watchers whose key has lost the scope `admin`, and offer a new snapshot, with the statistics
        of the round before, to the others. End when no watcher is left. If a snapshot or the asking fails, that is
        logged, and all streams end. At the end, call `watched` with False, and close the channels to kvstores."""
        try:
            while self._watchers:
                asking = asyncio.create_task(self._stores.refresh())
                try:
                    for watcher in self._watchers:
                        if not self._keys.admit(watcher.authorization, ADMIN):
                            watcher.close()
                    self._last = b"data: " + self._snapshots.frame() + b"\n\n"
                    for watcher in self._watchers:
                        watcher.offer(self._last)
                    await asyncio.sleep(self._interval_s)
                    await asking
                finally:
                    asking.cancel()
        except Exception:
            log.exception("the console's snapshot could not be made")
        finally:
            for watcher in self._watchers:
                watcher.close()
            self._last, self._task = b"", None  # the next watcher starts another task
            self._watched(False)
            await self._stores.close_channels()


async def _close_when_gone(receive: Receive, watcher: _Watcher) -> None:
    """Wait until the client has left, then close its watcher."""
    while (await receive())["type"] != "http.disconnect":
        pass
    watcher.close()

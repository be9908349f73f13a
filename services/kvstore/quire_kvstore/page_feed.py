"""Who has to be told of stored and removed pages: numbered changes, one bounded queue per watcher.

A watcher that falls behind loses its queue and takes a new snapshot; nobody else waits for it. `publish`, `open` and
`restart` are called under the store's lock, so that a snapshot and the numbers agree; `next` is not.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.pages import PageKey


@dataclass(frozen=True)
class PageChange:
    """One change. `parents[i]` is the hash before `stored[i]` in its run, empty where the store was not told."""

    sequence: int
    stored: tuple[PageKey, ...] = ()
    parents: tuple[bytes, ...] = ()
    removed: tuple[PageKey, ...] = ()


class Watcher:
    """One peer's queue."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: deque[PageChange] = deque()
        self._wake = threading.Condition()
        self._behind = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nothing will come any more."""
        return self._closed

    def next(self) -> PageChange | None:
        """Wait for a change. None: the watcher fell behind, or is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._behind or self._closed)
            if self._closed or self._behind:
                return None
            return self._queue.popleft()

    def close(self) -> None:
        """End it; callable from any thread, also more than once."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def restart(self) -> None:
        """Forget what waits: a snapshot replaces it."""
        with self._wake:
            self._queue.clear()
            self._behind = False

    def push(self, change: PageChange) -> None:
        """Add a change, or fall behind."""
        with self._wake:
            if len(self._queue) >= self._limit:
                self._queue.clear()
                self._behind = True
            elif not self._behind:
                self._queue.append(change)
            self._wake.notify_all()


class PageFeed:
    """All watchers."""

    def __init__(self, max_watchers: int, queue_limit: int) -> None:
        self._max_watchers = max_watchers
        self._queue_limit = queue_limit
        self._watchers: list[Watcher] = []
        self._closed = False
        self.sequence = 0

    def __len__(self) -> int:
        return len(self._watchers)

    def publish(
        self, stored: Sequence[PageKey] = (), parents: Sequence[bytes] = (), removed: Sequence[PageKey] = ()
    ) -> None:
        """Number a change and hand it to everybody."""
        if stored or removed:
            self.sequence += 1
            change = PageChange(self.sequence, tuple(stored), tuple(parents), tuple(removed))
            for watcher in self._watchers:
                watcher.push(change)

    def open(self) -> Watcher:
        """A new watcher; raises Overloaded."""
        if len(self._watchers) >= self._max_watchers:
            raise Overloaded(
                "TOO_MANY_WATCHERS",
                f"{self._max_watchers} peers watch the kvstore already.",
                "Retry later, watch through a relay, or raise max_watchers.",
                retry_after_s=5.0,
            )
        watcher = Watcher(self._queue_limit)
        if self._closed:
            watcher.close()
        self._watchers.append(watcher)
        return watcher

    def drop(self, watcher: Watcher) -> None:
        """The peer has gone."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def close(self) -> None:
        """End all watchers, and those that come later."""
        self._closed = True
        for watcher in self._watchers:
            watcher.close()

"""PageFeed: tells watchers of stored and removed pages.

Changes are numbered and kept in one bounded queue, the tail. All watchers read from it, each at its own pace. A watcher
takes a new snapshot if the tail no longer has the changes that it needs next, so no watcher delays the store.
`publish`, `force_snapshots`, `start_snapshot`, `add_watcher`, `remove_watcher` and PageFeed's `close` are called under
the store's lock, so that a snapshot and the numbers agree. `wait_for_changes` is called without it.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from quire_common.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.pages import PageKey


@dataclass(frozen=True)
class PageChange:
    """One change. `parents[i]` is the hash of the page before `stored[i]` in its run; it is empty if the store was not
    told."""

    sequence: int
    stored: tuple[PageKey, ...] = ()
    parents: tuple[bytes, ...] = ()
    removed: tuple[PageKey, ...] = ()


class Watcher:
    """One peer's place in the tail. `at` is the number of the last change that the peer knows; -1 means that it knows
    none."""

    def __init__(self, feed: PageFeed, at: int) -> None:
        self.at = at
        self._feed = feed
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the watcher is closed: it gets no more changes."""
        return self._closed

    @property
    def is_current(self) -> bool:
        """Whether the peer knows all changes so far."""
        return self.at == self._feed.sequence

    def wait_for_changes(self, pause_s: float = 0.0) -> list[PageChange] | None:
        """Let `pause_s` pass (a `close` cuts this short), then block until there are changes. Returns the changes after
        number `at`, which moves on, or None if the tail lacks some of them, `at` lies ahead of the feed, or the watcher
        is closed."""
        feed = self._feed
        with feed.changed:
            if pause_s > 0:
                feed.changed.wait_for(lambda: self._closed, pause_s)
            feed.changed.wait_for(lambda: self._closed or self.at != feed.sequence)
            changes = None if self._closed else feed.changes_after(self.at)
            if changes:
                self.at = changes[-1].sequence
            return changes

    def close(self) -> None:
        """Close the watcher. May be called from any thread, and more than once."""
        with self._feed.changed:
            self._closed = True
            self._feed.changed.notify_all()

    def lose_place(self) -> None:
        """Note that the peer must forget all pages: its next message is a snapshot."""
        self.at = -1

    def start_snapshot(self) -> int:
        """Note that a snapshot is taken now. Returns the number of the last change in it."""
        self.at = self._feed.sequence
        return self.at


class PageFeed:
    """The tail and its watchers. `changed` guards the tail, which keeps the last `tail` changes."""

    def __init__(self, max_watchers: int, tail: int) -> None:
        self.sequence = 0
        self.changed = threading.Condition()
        self._max_watchers = max_watchers
        self._watchers: list[Watcher] = []
        self._changes: deque[PageChange] = deque(maxlen=tail)
        self._closed = False

    def __len__(self) -> int:
        return len(self._watchers)

    def publish(
        self, stored: Sequence[PageKey] = (), parents: Sequence[bytes] = (), removed: Sequence[PageKey] = ()
    ) -> None:
        """Add a numbered change to the tail and wake all watchers. Does nothing if the change is empty. `parents[i]` is
        the hash of the page before `stored[i]` in its run, or empty."""
        if stored or removed:
            with self.changed:
                self.sequence += 1
                self._changes.append(PageChange(self.sequence, tuple(stored), tuple(parents), tuple(removed)))
                self.changed.notify_all()

    def force_snapshots(self) -> None:
        """Clear the tail, so that every watcher takes a new snapshot. For more changes than can be listed one by
        one."""
        with self.changed:
            self.sequence += 1
            self._changes.clear()
            self.changed.notify_all()

    def changes_after(self, at: int) -> list[PageChange] | None:
        """Return the changes after number `at`, or None if the tail lacks some of them or `at` lies ahead of the feed.
        Called with `changed` held."""
        if at == self.sequence:
            return []
        if at > self.sequence or not self._changes or self._changes[0].sequence > at + 1:
            return None
        return list(islice(self._changes, at + 1 - self._changes[0].sequence, None))

    def add_watcher(self, at: int = -1) -> Watcher:
        """Add a watcher whose peer knows all changes up to number `at`, and return it. With -1, the peer knows none and
        needs a snapshot first. If the feed is closed, so is the watcher. Raises Overloaded if there are too many
        watchers."""
        if len(self._watchers) >= self._max_watchers:
            raise Overloaded(
                "TOO_MANY_WATCHERS",
                f"{self._max_watchers} peers watch the kvstore already.",
                "Retry later, watch through a relay, or raise max_watchers.",
                retry_after_s=5.0,
            )
        watcher = Watcher(self, at)
        if self._closed:
            watcher.close()
        self._watchers.append(watcher)
        return watcher

    def remove_watcher(self, watcher: Watcher) -> None:
        """Remove the watcher of a peer that has gone."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def close(self) -> None:
        """Close all watchers, and those added later."""
        self._closed = True
        for watcher in self._watchers:
            watcher.close()

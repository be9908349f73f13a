"""Export: the pages of one lease that peers fetch from this worker. Export knows nothing of sockets.

One session at a time serves an export: its holder. A peer that connects again takes over from its own earlier
connection. The engine puts the requested pages into the ring in ascending order, each once it is filled. Only the next
few pages of the holder get slots of the ring. So every page in a slot can be sent next, and no session waits for slots
that hold later pages.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from quire_common.errors import NotFound
from quire_common.kv_data.lease_key import handle_of
from quire_common.pages import PageRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_worker.kv_transfer.job_queue import Job


class Holder(Protocol):
    """The session that serves an export."""

    def stop(self) -> None:
        """End the session, from another thread."""


class Export:
    """One export. Once `over` is true, it stays true. The process's main thread and the sessions' threads use it."""

    def __init__(self, job: Job, namespace: bytes) -> None:
        self.job = job
        self.key = job.move.lease_key
        self.handle = handle_of(self.key)
        self.run = PageRun(namespace, job.move.group, job.move.hashes)
        self.over = False
        self._changed = threading.Condition()
        self._holder: Holder | None = None
        self._due: set[int] = set()
        self._asked: set[int] = set()
        self._filled: dict[int, int] = {}
        self._offered = 0

    def take_over(self, holder: Holder) -> list[int]:
        """Make `holder` the session that serves the export, and stop the session before it. Nothing is due from now on.
        Returns ring slots of pages that were filled and not sent, which the caller must release. Raises NotFound if the
        export is over."""
        with self._changed:
            if self.over:
                raise export_ended()
            before, self._holder = self._holder, holder
            slots = self._take_filled()
            self._changed.notify_all()
        if before is not None:
            before.stop()
        return slots

    def request_pages(self, holder: Holder, indices: Sequence[int], several: int) -> list[int]:
        """Note that these pages, in ascending order, are due next. Return those that the caller must request from the
        engine: those neither requested before nor in the ring. Each request wakes the engine. So none are returned
        while fewer than `several` are new, unless the first page is one of them. If the session is not the holder, or
        the export is over, nothing is noted and none are returned."""
        with self._changed:
            if self._is_lost(holder):
                return []
            self._due.update(indices)
            new = [index for index in indices if index not in self._asked and index not in self._filled]
            if len(new) < several and new[:1] != list(indices[:1]):
                return []
            self._asked.update(new)
            return new

    def is_filled(self, index: int) -> bool:
        """Whether the page is in the ring."""
        return index in self._filled

    def take_slot(self, holder: Holder, index: int, timeout_s: float) -> int | None:
        """Wait for a page and take its slot, which the holder must release; None if it does not come in time. Raises
        NotFound if the export is over or has another holder."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_lost(holder) or index in self._filled, timeout_s)
            if self._is_lost(holder):
                raise export_ended()
            slot = self._filled.pop(index, None)
            if slot is not None:
                self._due.discard(index)
            return slot

    def fill(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        """Take pages that have come into the ring, as (index, slot), and wake the holder; returns the slots of pages
        that are not due or are there already, which the caller must release."""
        unwanted = []
        with self._changed:
            for index, slot in pairs:
                self._asked.discard(index)
                if index in self._due and index not in self._filled:
                    self._filled[index] = slot
                else:
                    unwanted.append(slot)
            self._changed.notify_all()
        return unwanted

    def offer(self, pages: int) -> None:
        """Note that the first `pages` pages are filled, and wake the holder."""
        with self._changed:
            self._offered = pages
            self._changed.notify_all()

    def await_offer(self, holder: Holder, index: int, timeout_s: float) -> int | None:
        """Wait until page `index` is filled. Returns the number of filled pages, or None if the page is not filled in
        time. Raises NotFound as `take_slot` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_lost(holder) or index < self._offered, timeout_s)
            if self._is_lost(holder):
                raise export_ended()
            return self._offered if index < self._offered else None

    def detach(self, holder: Holder) -> list[int]:
        """End the service by `holder`; returns ring slots of pages that were not sent, which the caller must release.
        Does nothing, and returns none, if this session is not the holder."""
        with self._changed:
            if self._holder is not holder:
                return []
            self._holder = None
            return self._take_filled()

    def end(self) -> list[int]:
        """End the export for good. Returns ring slots of pages that were not sent, which the caller must release. A
        holder that waits for a page is woken and gets NotFound; another one notices the end at its next call."""
        with self._changed:
            self.over = True
            self._changed.notify_all()
            return self._take_filled()

    def _is_lost(self, holder: Holder) -> bool:
        return self.over or self._holder is not holder

    def _take_filled(self) -> list[int]:
        """Forget which pages are in the ring and which are due. Returns the slots of those in the ring. The caller
        holds the lock."""
        slots = list(self._filled.values())
        self._filled.clear()
        self._due.clear()
        return slots


def export_ended() -> NotFound:
    """Return the error for a lease that was known here and has ended."""
    return NotFound("EXPORT_ENDED", "The export has ended.", "Compute the pages.")


def export_unknown() -> NotFound:
    """Return the error for a lease that is not known here, and perhaps not yet."""
    return NotFound("EXPORT_UNKNOWN", "No export has this lease.", "Compute the pages.")

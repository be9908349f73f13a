"""Export: one lease's pages on their way out of this worker. Knows nothing of sockets.

One session at a time serves it, its holder: a peer that comes again takes over from its own earlier connection. The
engine puts pages into the ring as they are asked for and filled, the first first. Slots are kept for none but the next
few pages of the holder: whoever has slots can send, and nobody waits for those that hold what comes later.
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
    """Who serves an export."""

    def stop(self) -> None:
        """End it, from another thread."""


class Export:
    """`over` never becomes false again. Used by the process's main thread and by sessions' threads."""

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
        """From now on the holder serves it; returns slots that nobody wants. Raises NotFound."""
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
        """These are due next, in ascending order; returns those that the engine was not asked for yet: now it is. None,
        unless they are several or the first of all is among them: each question wakes the engine."""
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
        """The slot of a page, which is the holder's to release; None where it does not come in time. Raises NotFound
        where the export is over, or another's."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_lost(holder) or index in self._filled, timeout_s)
            if self._is_lost(holder):
                raise export_ended()
            slot = self._filled.pop(index, None)
            if slot is not None:
                self._due.discard(index)
            return slot

    def fill(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        """Pages have come into the ring, as index and slot; returns slots that nobody wants."""
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
        """So many pages, from the first on, are filled."""
        with self._changed:
            self._offered = pages
            self._changed.notify_all()

    def await_offer(self, holder: Holder, index: int, timeout_s: float) -> int | None:
        """How many pages are filled, once that page is; None where it is not in time. Raises NotFound as
        `take_slot`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_lost(holder) or index < self._offered, timeout_s)
            if self._is_lost(holder):
                raise export_ended()
            return self._offered if index < self._offered else None

    def detach(self, holder: Holder) -> list[int]:
        """The holder serves it no more; returns slots that nobody wants."""
        with self._changed:
            if self._holder is not holder:
                return []
            self._holder = None
            return self._take_filled()

    def end(self) -> list[int]:
        """It is over; returns slots that nobody wants. Its holder, if it has one, finds out by itself."""
        with self._changed:
            self.over = True
            self._changed.notify_all()
            return self._take_filled()

    def _is_lost(self, holder: Holder) -> bool:
        return self.over or self._holder is not holder

    def _take_filled(self) -> list[int]:
        slots = list(self._filled.values())
        self._filled.clear()
        self._due.clear()
        return slots


def export_ended() -> NotFound:
    """The lease was known here, and is no more."""
    return NotFound("EXPORT_ENDED", "The export has ended.", "Compute the pages.")


def export_unknown() -> NotFound:
    """It may be that the lease is yet to be known."""
    return NotFound("EXPORT_UNKNOWN", "No export has this lease.", "Compute the pages.")

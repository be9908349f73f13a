"""PageHolder: applies the stream of one holder's page events to the directory. It handles snapshots, changes, epochs
and gaps.

The pages of a new snapshot are collected under a new number, and replace the known pages when the snapshot is complete.
So a resync leaves no gap. A new epoch means that the holder has restarted, so its former pages are dropped at once.
This module knows nothing of connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.credit.hello import Epoch
from quire_router.pages.page_keys import page_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_router.pages.page_directory import PageDirectory


class PageGap(Exception):  # reads as the fact it is; the stream answers it with a new one
    """Changes were missed, so the stream must begin with a snapshot."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The pages of one namespace and group. `namespace` is empty if the sender has only one pool and does not name
    it."""

    namespace: bytes
    group: int
    hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """A frame of a stream: the changes `first` to `last`, or a part of a snapshot as of `last`. `complete`: this part
    of the snapshot is the last. `cleared`: the holder has dropped all pages that it had before."""

    epoch: Epoch
    first: int
    last: int
    stored: Sequence[Pool] = ()
    removed: Sequence[Pool] = ()
    snapshot: bool = False
    complete: bool = False
    cleared: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether the frame only says that nothing was missed."""
        return not (self.snapshot or self.cleared or self.stored or self.removed)


class PageHolder:
    """`moved` is called with two values when one of them has changed. The first is the number under which the directory
    has the holder's pages; -1: the holder has no pages. The second is the life (boot id) of which the directory has
    every page, as of the last frame; 0: some may be missing. `epoch` and `sequence` are the place at which the stream
    may resume; if `epoch` is None, it cannot."""

    def __init__(self, directory: PageDirectory, moved: Callable[[int, int], None]) -> None:
        self.epoch: Epoch | None = None
        self.sequence = 0
        self.number = -1
        self._directory = directory
        self._moved = moved
        self._last_report = (-1, 0)
        # The epoch of the pages that the directory has: after missed changes they stay until a snapshot replaces them.
        self._pages_epoch: Epoch | None = None
        # The stream is open, and has missed nothing.
        self._follows = False
        self._coming: tuple[Epoch, int, int] | None = None
        self._pool = (b"", 0)

    def apply(self, update: PageUpdate) -> None:
        """Apply a frame, a change or a part of a snapshot, to the directory, and report a new state to `moved`. The
        pages of a snapshot count only when its last part has come. Raises PageGap for a change that does not follow on
        the last frame (changes were missed, or the epoch is another), or that comes while a snapshot is incomplete. An
        empty change at the place of the last frame that was applied is no gap unless a snapshot is incomplete: it only
        says that the stream is followed."""
        if update.snapshot:
            self._apply_snapshot(update)
            return
        here = (update.epoch, update.last) == (self.epoch, self.sequence) and self._coming is None
        if not (update.is_empty and here):
            self._apply_change(update)
        self._follows = True
        self._report()

    def restart(self) -> None:
        """Record that the stream has ended. A snapshot that is not complete is dropped; the other pages and the place
        to resume stay, but `moved` is told that some may be missing."""
        self._follows = False
        if self._coming is not None:
            self._directory.close(self._coming[2])
            self._coming = None
        self._report()

    def require_snapshot(self) -> None:
        """Forget where the stream may resume, since a change was missed. The stream must begin with a snapshot. No page
        is dropped here."""
        self.epoch = None

    def forget(self) -> None:
        """Drop all pages of the holder, tell `moved` so, and forget where its stream may resume: `epoch` becomes None,
        and `sequence` 0."""
        self.restart()
        self.epoch, self.sequence = None, 0
        self._pages_epoch = None
        self._take_number(-1)

    def _apply_change(self, update: PageUpdate) -> None:
        """Apply a frame of changes: a clear (all pages go: the holder gets a new number, and `moved` is told), removed
        pages, stored pages, in this order. Then the stream may resume after this frame. Raises PageGap if it does not
        follow on the last frame, or if a snapshot is incomplete."""
        if update.epoch != self.epoch or update.first != self.sequence + 1 or self._coming is not None:
            raise PageGap(f"change {update.first} of {update.epoch} after {self.sequence} of {self.epoch}")
        if update.cleared:
            self._take_number(self._directory.open())
        for pool in update.removed:
            self._directory.remove(self.number, page_keys(*self._name(pool), pool.hashes))
        self._store(self.number, update)
        self.sequence = update.last

    def _apply_snapshot(self, update: PageUpdate) -> None:
        """Collect a part of a snapshot under a new number, which replaces the former number when the snapshot is
        complete. Then the stream may resume at this snapshot. The first part of a snapshot (a part with another epoch
        or number than the parts before) drops the parts of another one that were collected before, and `moved` is told
        that pages may be missing. If the epoch has changed, it also drops the former pages at once."""
        if self._coming is None or self._coming[:2] != (update.epoch, update.last):
            self.restart()
            if update.epoch != self._pages_epoch:
                self.forget()
            self._coming = (update.epoch, update.last, self._directory.open())
        self._store(self._coming[2], update)
        if update.complete:
            self.epoch, self.sequence, number = self._coming
            self._pages_epoch = self.epoch
            self._coming = None
            self._follows = True
            self._take_number(number)

    def _store(self, number: int, update: PageUpdate) -> None:
        """Add the frame's stored pages to the directory under `number`; remember their pool, for removals that name
        none."""
        for pool in update.stored:
            self._pool = (pool.namespace, pool.group)
            self._directory.add(number, page_keys(pool.namespace, pool.group, pool.hashes))

    def _name(self, pool: Pool) -> tuple[bytes, int]:
        """Return namespace and group of a pool of removed pages. If the pool has no name, these are those of the pages
        that were stored last."""
        return (pool.namespace, pool.group) if pool.namespace else self._pool

    def _take_number(self, number: int) -> None:
        """Make `number`, which the directory has opened, the holder's number (-1: none), and report a change to
        `moved`. The directory drops the pages of the former number."""
        former, self.number = self.number, number
        self._report()
        if former >= 0:
            self._directory.close(former)

    def _report(self) -> None:
        """Report the holder's number in the directory (-1: none) to `moved`, and the life (boot id) of which the
        directory has every page, if either has changed. The life is 0 while pages are missing or the stream is not
        followed."""
        life = 0
        if self._follows and self.epoch is not None and not self._directory.lacks(self.number):
            life = self.epoch.boot_id
        said = (self.number, life)
        if said != self._last_report:
            self._last_report = said
            self._moved(*said)

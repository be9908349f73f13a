"""Pages on a disk of this machine, which are found again after a restart. A failed read is a miss, and a page whose
write fails is not kept here. Failures are counted, except that of a missing file.

If the disk cannot be opened, the backend tries again now and then. If it cannot be written to (full, read-only,
broken), the backend does not write for `retry_s`, but still reads. The disk counts as full when less than
`keep_free_bytes` would be free. If the disk is full although the pages are within their capacity, other programs need
the room. So some of the oldest pages are removed.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

from quire_common.circuit_breaker import CircuitBreaker
from quire_common.errors import require
from quire_common.telemetry.logs import get_logger
from quire_kvstore.tiers.aligned import whole_blocks
from quire_kvstore.tiers.backend import TierCounts
from quire_kvstore.tiers.disk_files import PAGE_LOST, DiskFiles, ScanFigures
from quire_kvstore.tiers.disk_index import DiskIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from quire_common.pages import PageKey
    from quire_kvstore.tiers.backend import AllocateBuffer, Deliver, PageJob, PagesFound, PagesRemoved

log = get_logger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# How many pages of the size of the refused one make room on a disk that is full.
_PAGES_EVICTED_WHEN_FULL = 4


class DiskBackend:
    """Implements TierBackend."""

    name = "disk"
    local = True
    read_batch = 1
    write_batch = 1

    def __init__(self, root: Path, capacity_bytes: int, policy: str, retry_s: float, keep_free_bytes: int = 0) -> None:
        self.counts = TierCounts()
        self._on_pages_removed: PagesRemoved = lambda keys: None
        self._on_pages_found: PagesFound = lambda: None
        self._files = DiskFiles(root)
        self._path = str(root)
        self._index = DiskIndex(capacity_bytes, policy)
        self._open_breaker = CircuitBreaker(retry_s, retry_s, max_failures=1, name="disk_open")
        self._write_breaker = CircuitBreaker(retry_s, retry_s, max_failures=1, name="disk_write")
        self._keep_free_bytes = keep_free_bytes
        self._is_open = False

    def call_back(self, on_pages_removed: PagesRemoved, on_pages_found: PagesFound) -> None:
        self._on_pages_removed, self._on_pages_found = on_pages_removed, on_pages_found

    @property
    def available(self) -> bool:
        """Whether the disk is open and writable."""
        return self._is_open and self._write_breaker.closed

    @property
    def pages(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes taken, in whole blocks."""
        return self._index.used_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._index.capacity_bytes

    def held_keys(self) -> list[PageKey]:
        return self._index.held_keys()

    def may_have(self, key: PageKey) -> bool:
        return key in self._index

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Mark these pages as used, in memory alone; the time on the disk is set when a page is read."""
        self._index.touch(keys)

    def refresh(self, keys: Iterable[PageKey]) -> None:
        self._index.refresh(keys)

    def open(self) -> None:
        """Lock the folder, and index its pages by their headers. A page larger than the capacity is removed, and so are
        the oldest pages until the rest fits. If an old page cannot be removed, the newer page that needs its room is
        removed. If any page is left, that is reported. Files that the scan removed count as corrupt, and files that it
        could not read as errors, which are logged together. A failure is counted, logged once and tried again later.
        Does nothing if the disk is open already, or if it is too early to try again."""
        if self._is_open or not self._open_breaker.try_now():
            return
        started, figures = time.monotonic(), ScanFigures()
        try:
            self._files.open()
            found = self._files.scan(figures)
        except OSError as error:
            self._files.close()
            self.counts.add(errors=1)
            if self._open_breaker.failed():
                log.warning("the disk tier cannot be opened; it is tried again", path=self._path, reason=str(error))
            return
        self._open_breaker.succeeded()
        for page in found:
            victims = self._index.begin_write(page.key, page.size)
            fits = victims is not None and self._remove_evicted(victims)
            if victims is not None:
                self._index.finish_write(page.key, written=fits)
            if not fits:
                self._remove([page.key])
        self.counts.add(foreign=figures.foreign, corrupt=figures.removed, errors=figures.unread)
        if figures.unread:
            log.warning(
                "files of the disk tier cannot be read now; they stay until the next start",
                path=self._path,
                files=figures.unread,
                reason=figures.unread_reason,
            )
        if self.pages:
            self._on_pages_found()
        self._is_open = True
        log.info(
            "the disk tier is open",
            path=self._path,
            pages=self.pages,
            bytes=self.used_bytes,
            foreign=figures.foreign,
            removed=figures.removed,
            seconds=round(time.monotonic() - started, 3),
        )

    def maintain(self) -> None:
        self.open()

    def read(self, jobs: Sequence[PageJob], allocate_buffer: AllocateBuffer, deliver: Deliver) -> None:
        """Read the file of each page into the buffer that `allocate_buffer` gives, and deliver the bytes read: an empty
        view if the file has another length, None if the page is not indexed or cannot be read. A page whose file is
        lost is discarded. A job without a buffer is skipped."""
        for job in jobs:
            size = self._index.size(job.key)
            if size is None:  # it has gone meanwhile
                deliver(job, None)
                continue
            into = allocate_buffer(job, size)
            if into is None:
                continue
            try:
                got = self._files.read(job.key, into, job.stamp_ns)
            except OSError as error:
                self._on_read_error(job.key, error)
                deliver(job, None)
            else:
                deliver(job, into[:got])

    def write(self, pages: Sequence[tuple[PageJob, memoryview]]) -> int:
        return sum(self._write(job, framed) for job, framed in pages)

    def discard(self, key: PageKey) -> None:
        """Remove the page's file, forget the page, and report its removal if it was indexed."""
        self._remove([key])  # before it is forgotten: until then nobody writes it anew
        if self._index.forget(key):
            self._on_pages_removed([key])

    def close(self) -> None:
        self._is_open = False
        self._files.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the index agrees with itself, and every page in it has its file."""
        self._index.check_integrity()
        missing = [key for key in self._index.held_keys() if not self._files.path(key).is_file()]
        require(not missing, "a page of the index has no file")

    def _write(self, job: PageJob, framed: memoryview) -> bool:
        """Write one page, and evict others to make room. Returns whether the page is stored now, or was before: not if
        the disk is not open, writes are paused, the page does not fit, an evicted page cannot be removed, or another
        thread writes or removes the page. A failed write is counted, and the first one in a row is logged. After it, or
        after a failed removal, no page is written for `retry_s`; if the disk is full, a few old pages are removed
        too."""
        if job.key in self._index:
            return True
        if not self._is_open or not self._write_breaker.try_now():
            return False
        victims = self._index.begin_write(job.key, len(framed))
        if victims is None:
            return False  # Nothing was written: the breaker learns nothing from that.
        if not self._remove_evicted(victims):
            self._index.finish_write(job.key, written=False)
            self._write_breaker.failed()
            return False
        try:
            self._files.require_free(len(framed) + self._keep_free_bytes)
            self._files.write(job.key, framed, job.stamp_ns)
        except OSError as error:
            self._index.finish_write(job.key, written=False)
            self.counts.add(errors=1)
            if self._write_breaker.failed():
                log.warning("the disk tier cannot be written", path=self._path, reason=str(error))
            if error.errno in _FULL:
                self._remove_evicted(self._index.evict(_PAGES_EVICTED_WHEN_FULL * whole_blocks(len(framed))))
            return False
        self._index.finish_write(job.key, written=True)
        self.counts.add(stored=1, bytes_written=len(framed))
        if self._write_breaker.succeeded():
            log.info("the disk tier can be written again", path=self._path)
        return True

    def _remove_evicted(self, victims: Sequence[PageKey]) -> bool:
        """Remove the files of pages that the index has evicted, count the pages and report that they are gone. A page
        whose file cannot be removed stays, and keeps its room. Returns whether all were removed."""
        removed = self._remove(victims)
        self._index.finish_removal(set(victims).difference(removed), removed=False)
        self._index.finish_removal(removed, removed=True)
        if removed:
            self.counts.add(evictions=len(removed))
            self._on_pages_removed(removed)
        return len(removed) == len(victims)

    def _remove(self, keys: Sequence[PageKey]) -> list[PageKey]:
        """Remove the files of these pages, and return those that were removed; errors are counted and logged."""
        removed = []
        for key in keys:
            try:
                self._files.remove(key)
            except OSError as error:
                self.counts.add(errors=1)
                log.warning("a page's file cannot be removed", path=self._path, reason=str(error))
            else:
                removed.append(key)
        return removed

    def _on_read_error(self, key: PageKey, error: OSError) -> None:
        """Count and log a failed read, except that of a missing file. A page whose file is missing, replaced or
        unreadable is discarded; other errors keep it."""
        if error.errno != errno.ENOENT:
            self.counts.add(errors=1)
            log.warning("a page cannot be read", path=self._path, reason=str(error))
        if error.errno in PAGE_LOST:
            self.discard(key)

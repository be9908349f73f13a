"""A backend in memory that answers when a test lets it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from quire_kvstore.tiers.backend import TierCounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quire_common.pages import PageKey
    from quire_kvstore.tiers.backend import AllocateBuffer, Deliver, PageJob, PagesFound, PagesRemoved


class ScriptedBackend:
    """Implements TierBackend. Reads wait for `allow(n)`; `blind`: nobody knows what it has but itself."""

    name = "scripted"
    local = True
    read_batch = 1
    write_batch = 1
    available = True
    used_bytes = 0
    capacity_bytes = 0

    def __init__(self, *, free: bool = True, blind: bool = False) -> None:
        self.counts = TierCounts()
        self._on_pages_removed: PagesRemoved = lambda keys: None
        self._on_pages_found: PagesFound = lambda: None
        self.held: dict[PageKey, bytes] = {}
        self.reads: list[PageKey] = []
        self.begun = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self.free = free
        self._blind = blind
        self.local = not blind
        self.broken = False

    def call_back(self, on_pages_removed: PagesRemoved, on_pages_found: PagesFound) -> None:
        self._on_pages_removed, self._on_pages_found = on_pages_removed, on_pages_found

    @property
    def pages(self) -> int:
        return len(self.held)

    def allow(self, count: int) -> None:
        for _ in range(count):
            self._permits.release()

    def release_all(self) -> None:
        self.free = True
        self.allow(10_000)

    def held_keys(self) -> list[PageKey]:
        return list(self.held) if self.local else []

    def may_have(self, key: PageKey) -> bool:
        return self._blind or key in self.held

    def touch(self, keys: Iterable[PageKey]) -> None:
        pass

    def refresh(self, keys: Iterable[PageKey]) -> None:
        pass

    def open(self) -> None:
        pass

    def maintain(self) -> None:
        pass

    def read(self, jobs: Sequence[PageJob], allocate_buffer: AllocateBuffer, deliver: Deliver) -> None:
        for job in jobs:
            page = self.held.get(job.key, b"")
            into = allocate_buffer(job, len(page)) if page else None
            if page and into is None:
                continue
            self.reads.append(job.key)
            self.begun.release()
            if not self.free:
                assert self._permits.acquire(timeout=60)
            if self.broken:
                raise RuntimeError("a medium with a bug")
            if into is not None:
                into[:] = page
            deliver(job, into)

    def write(self, pages: Sequence[tuple[PageJob, memoryview]]) -> int:
        for job, framed in pages:
            self.held[job.key] = bytes(framed)
        self.counts.add(stored=len(pages))
        return len(pages)

    def discard(self, key: PageKey) -> None:
        if self.held.pop(key, None) is not None:
            self._on_pages_removed([key])

    def close(self) -> None:
        pass

    def check_integrity(self) -> None:
        pass

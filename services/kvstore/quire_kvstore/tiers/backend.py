"""TierBackend: the interface of a tier below RAM. A backend keeps framed pages or loses them, and does not raise the
errors of its medium."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from quire_common.pages import PageKey

    Deliver = Callable[["PageJob", memoryview | None], None]
    AllocateBuffer = Callable[["PageJob", int], memoryview | None]
    PagesRemoved = Callable[[Sequence[PageKey]], None]
    PagesFound = Callable[[], None]


@dataclass(eq=False)
class PageJob:
    """A page to be read or written. `stamp_ns` orders pages by use, a chain's head after its tail."""

    key: PageKey
    stamp_ns: int


@dataclass
class TierFigures:
    """Counts since the start, of pages unless a name says otherwise."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evictions: int = 0
    corrupt: int = 0
    unauthenticated: int = 0
    dropped: int = 0
    foreign: int = 0
    errors: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class TierCounts:
    """TierFigures that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures = TierFigures()

    def add(self, **counts: int) -> None:
        """Add to the figures of these names."""
        with self._lock:
            for name, count in counts.items():
                setattr(self._figures, name, getattr(self._figures, name) + count)

    def snapshot(self) -> TierFigures:
        """A copy."""
        with self._lock:
            return TierFigures(**{field.name: getattr(self._figures, field.name) for field in fields(TierFigures)})


class TierBackend(Protocol):
    """A store of pages below RAM. `may_have`, `touch`, `refresh`, `held_keys` and the properties never wait for the
    medium, and any thread may call them. `maintain`, `read`, `write` and `discard` are called by the tier's threads
    alone; these methods and `open` may take as long as the medium does. If an operation fails, the backend counts the
    failure and answers with a miss."""

    name: str
    local: bool
    """Whether what it holds is this instance's own, to be told to those who watch."""
    read_batch: int
    write_batch: int
    counts: TierCounts

    def call_back(self, on_pages_removed: PagesRemoved, on_pages_found: PagesFound) -> None:
        """Set the callbacks, before `open`: one for pages that the backend no longer has, one for pages of an earlier
        process that it has found."""

    @property
    def available(self) -> bool:
        """Whether the backend works, as far as is known."""

    @property
    def pages(self) -> int:
        """Number of pages that the backend holds; 0 if unknown."""

    @property
    def used_bytes(self) -> int:
        """Bytes taken."""

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that the backend may take; 0 if the kvstore sets no limit."""

    def held_keys(self) -> list[PageKey]:
        """Return the keys of all pages, in the eviction policy's order; none if they are unknown."""

    def may_have(self, key: PageKey) -> bool:
        """Return False if a read would certainly not find the page."""

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Note that these pages were used, in this order."""

    def refresh(self, keys: Iterable[PageKey]) -> None:
        """Note that these pages were written: they move to the end of the order of eviction, in this order. This does
        not count as a use."""

    def open(self) -> None:
        """Open the medium, as far as that is possible."""

    def maintain(self) -> None:
        """Try again what has failed. Called several times a second."""

    def read(self, jobs: Sequence[PageJob], allocate_buffer: AllocateBuffer, deliver: Deliver) -> None:
        """Read pages. For each job, ask `allocate_buffer` for memory of the framed page's size; if it returns None, the
        job has ended. Fill the memory and `deliver` it, unchecked, or deliver None if the read fails. A page that is
        not found may be delivered as None without a buffer."""

    def write(self, pages: Sequence[tuple[PageJob, memoryview]]) -> int:
        """Keep these framed pages; returns how many were kept, or were there already."""

    def discard(self, key: PageKey) -> None:
        """Remove a damaged page."""

    def close(self) -> None:
        """Close the medium. By now, no thread runs a method of the backend."""

    def check_integrity(self) -> None:
        """Raise AssertionError if the backend's state contradicts itself. Called while nothing is under way."""

"""TierBackend: the interface of a tier below RAM. A backend keeps framed pages or loses them, and never raises."""

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
    """What happened since the start, in pages unless said."""

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
    """Where pages are kept. `may_have`, `touch`, `refresh` and the properties never wait for the medium and may be
    called by any thread; the other methods are called by the tier's threads alone and may take as long as the medium
    does. A backend that fails counts it and answers with a miss.
    """

    name: str
    local: bool
    """Whether what it holds is this instance's own, to be told to those who watch."""
    read_batch: int
    write_batch: int
    counts: TierCounts

    def call_back(self, on_pages_removed: PagesRemoved, on_pages_found: PagesFound) -> None:
        """Before `open`: who is told of pages that it no longer has, and when it has found pages of an earlier life."""

    @property
    def available(self) -> bool:
        """Whether it works, as far as is known."""

    @property
    def pages(self) -> int:
        """How many it holds; 0 where nobody knows."""

    @property
    def used_bytes(self) -> int:
        """Bytes taken."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that it may take; 0 where it has no bound of ours."""

    def held_keys(self) -> list[PageKey]:
        """All that it holds, the page used last at the end; none where nobody knows."""

    def may_have(self, key: PageKey) -> bool:
        """False where it is certain that a read would find nothing."""

    def touch(self, keys: Iterable[PageKey]) -> None:
        """These were used, in this order."""

    def refresh(self, keys: Iterable[PageKey]) -> None:
        """These were written, not used: they go later than others, in this order."""

    def open(self) -> None:
        """Make ready, as far as possible."""

    def maintain(self) -> None:
        """Called several times a second: time to try again what failed."""

    def read(self, jobs: Sequence[PageJob], allocate_buffer: AllocateBuffer, deliver: Deliver) -> None:
        """Ask `allocate_buffer` for memory of each framed page's size, which may be refused: that job is over. Fill it,
        and `deliver` what has come, unchecked, or None. A page that is not found may be delivered as None without
        asking."""

    def write(self, pages: Sequence[tuple[PageJob, memoryview]]) -> int:
        """Keep these framed pages; returns how many were kept, or were there already."""

    def discard(self, key: PageKey) -> None:
        """Remove a page that is not what it should be."""

    def close(self) -> None:
        """No thread is inside any more."""

    def check_integrity(self) -> None:
        """It agrees with itself; asked when nothing is under way."""

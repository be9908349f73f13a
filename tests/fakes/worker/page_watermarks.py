"""How much of each page of the fake worker's pools is there, who fills it, and whether a start may run on it."""

from __future__ import annotations

from collections.abc import Iterable


class Watermarks:
    """One KV group. Writers are named by any hashable object that stands for one sequence's tenure of its slot."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._size = page_size
        self._ready = [0] * num_pages
        self._writer: dict[int, object] = {}
        self._pending: set[int] = set()
        self._failed: set[int] = set()

    def claim(self, pages: Iterable[int], writer: object, begun: int = 0) -> None:
        """The writer will fill these, of which the first holds `begun` tokens already."""
        for page in pages:
            assert page not in self._writer and page not in self._pending, f"page {page} is another's to fill"
            assert self._ready[page] >= begun, f"page {page} does not hold what its sequence was started on"
            self._ready[page], self._writer[page], begun = begun, writer, 0
            self._failed.discard(page)

    def check_writer(self, page: int, writer: object) -> None:
        assert self._writer.get(page) is writer, f"page {page} is written by who does not own it"

    def fill(self, page: int, upto: int) -> None:
        self._ready[page] = max(self._ready[page], upto)

    def leave(self, pages: Iterable[int], writer: object) -> None:
        """The writer is gone: what it did not fill nobody will."""
        for page in pages:
            if self._writer.get(page) is writer:
                del self._writer[page]

    def expect(self, pages: Iterable[int]) -> None:
        """A move will fill these."""
        for page in pages:
            assert page not in self._writer and page not in self._pending, f"page {page} is loaded though in use"
            self._ready[page] = 0
            self._pending.add(page)
            self._failed.discard(page)

    def arrived(self, pages: list[int], good: int, tail_tokens: int = 0) -> None:
        """The move has ended; its last page may hold fewer tokens than others."""
        self._pending.difference_update(pages)
        for page in pages[:good]:
            self._ready[page] = self._size
        if tail_tokens and good == len(pages):
            self._ready[pages[-1]] = tail_tokens
        self._failed.update(pages[good:])

    def judge(self, pages: list[int], refs: dict[int, int]) -> int | str:
        """Of a cached range of whole pages: how many are there ("wait" where that is not known yet, "lost" where they
        will not come). Fewer than all: the rest may be computed by who asks."""
        short = [index for index, page in enumerate(pages) if self._ready[page] < self._size]
        lost = [i for i in short if pages[i] not in self._writer and pages[i] not in self._pending]
        if not lost:
            return "wait" if short else len(pages)
        tail = pages[lost[0] :]
        if self._pending.intersection(tail):
            return "wait"
        mine = all(refs[page] == 1 for page in tail) and all(pages[i] in self._failed for i in lost)
        return lost[0] if mine else "lost"

    def filled(self, page: int) -> int:
        return self._ready[page]

    def is_ready(self, page: int) -> bool:
        return self._ready[page] == self._size

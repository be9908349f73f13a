"""SlabAllocator: slabs, which are places of one size, cut from spans of the block. It touches no memory.

Each page size has its own spans, so that small pages do not fragment the room for large ones. When the last slab of a
span is freed, the whole span becomes free for any page size. SlabAllocator is not thread-safe; the store's lock guards
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_common.errors import require
from quire_kvstore.extent_allocator import ExtentAllocator

# Pages larger than this have a span each.
SPAN_BYTES = 1 << 20


@dataclass(eq=False, slots=True)
class _Span:
    """A span of slabs. `free` holds its free slabs. The slab freed last is handed out first, while CPU caches still
    hold it."""

    start: int
    slab_bytes: int
    slabs: int
    free: list[int]


class SlabAllocator:
    """`capacity_bytes` in slabs."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._extents = ExtentAllocator(capacity_bytes)
        self._span_of: dict[int, _Span] = {}
        """By the start of each slab that somebody has."""
        self._open: dict[int, dict[int, _Span]] = {}
        """By slab size and start: spans with a free slab."""

    def allocate(self, slab_bytes: int) -> int | None:
        """Allocate a slab of `slab_bytes` from a span of this slab size that has a free one: from the span that got its
        first free slab last, the slab freed last. If there is no such span, cut a new span of up to 1 MiB, of one slab
        at least. Returns the slab's byte offset; None if no span fits."""
        spans = self._open.setdefault(slab_bytes, {})
        if spans:
            span = spans[next(reversed(spans))]
        else:
            extent = self._extents.allocate(slab_bytes, max(1, SPAN_BYTES // slab_bytes))
            if extent is None:
                return None
            start, slabs = extent
            places = [start + index * slab_bytes for index in reversed(range(slabs))]
            span = spans[start] = _Span(start, slab_bytes, slabs, places)
        slab = span.free.pop()
        if not span.free:
            del spans[span.start]
        self._span_of[slab] = span
        self.used_bytes += slab_bytes
        return slab

    def free(self, slab: int) -> None:
        """Give back the slab at this offset. A span whose slabs are all free goes back whole, for any slab size. Raises
        KeyError for a slab that is not in use."""
        span = self._span_of.pop(slab)
        span.free.append(slab)
        self.used_bytes -= span.slab_bytes
        spans = self._open[span.slab_bytes]
        if len(span.free) < span.slabs:
            spans[span.start] = span
            return
        spans.pop(span.start, None)
        self._extents.free(span.start)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the extents are consistent, each slab of a span is either free or in use, and
        `used_bytes` is right. Exactly the spans in use with a free slab must be open, under their slab size and
        start."""
        self._extents.check_integrity()
        spans = {span.start: span for span in self._span_of.values()}
        for size, opened in self._open.items():
            for start, span in opened.items():
                require(span.start == start and span.slab_bytes == size, "an open span is listed under another one")
                require(bool(span.free), "an open span has no free slab")
                require(spans.get(start) is span, "a span without a user has gone back")
        for span in spans.values():
            held = [slab for slab, of in self._span_of.items() if of is span]
            slabs = [span.start + i * span.slab_bytes for i in range(span.slabs)]
            require(sorted(held + span.free) == slabs, "a slab is free or in use")
            is_open = span.start in self._open.get(span.slab_bytes, {})
            require(bool(span.free) == is_open, "a span with a free slab is open")
        require(self.used_bytes == sum(span.slab_bytes for span in self._span_of.values()), "slabs were miscounted")

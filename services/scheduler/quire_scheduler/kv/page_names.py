"""PageNames: which device page holds which content. Watchers are told of changes by Stored and Removed events.

A page's name is the hash of its content. A page gets its name when all of it is computed, loaded or pulled, and loses
it when it is evicted or its content is suspect. If a second page has the same content, only the first one has the name.
This module knows nothing of requests or of the watchers.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from quire_common.errors import FailedPrecondition, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

DEVICE_TIER = "device"


class Stored(NamedTuple):
    """A chain of pages that the device now holds. `parent` is the hash before the first page, `tokens` are
    little-endian int32."""

    group: int
    parent: bytes
    hashes: tuple[bytes, ...]
    tokens: bytes


class Removed(NamedTuple):
    """Pages that the device no longer holds."""

    group: int
    hashes: tuple[bytes, ...]


class PageEvent(NamedTuple):
    """One change of the names. `sequence` grows by one with each event."""

    sequence: int
    stored: tuple[Stored, ...]
    removed: tuple[Removed, ...]


class _Named(NamedTuple):
    parent: bytes
    tokens: bytes


class PageNames:
    """The names of pages, and the last `tail` events. Each of the `listeners` is called after each event."""

    def __init__(self, groups: int, tail: int) -> None:
        self.sequence = 0
        self.listeners: list[Callable[[], None]] = []
        self._events: deque[PageEvent] = deque(maxlen=tail)
        self._hash_of: list[dict[int, bytes]] = [{} for _ in range(groups)]
        self._page_of: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._named: list[dict[bytes, _Named]] = [{} for _ in range(groups)]

    def pages(self, group: int) -> Mapping[bytes, int]:
        """Return the page of each hash, as a live view."""
        return self._page_of[group]

    def name(
        self, group: int, pages: Sequence[int], parent: bytes, hashes: Sequence[bytes], tokens: bytes
    ) -> list[int]:
        """Name the pages by their hashes, and tell listeners. The first page is the child of `parent`. `tokens` has the
        token ids of all pages, as int32 bytes. A hash that another page has already is skipped. Returns the pages that
        got a name."""
        page_bytes = len(tokens) // max(len(pages), 1)
        page_of, new, stored = self._page_of[group], list[int](), list[Stored]()
        for index, (page, digest) in enumerate(zip(pages, hashes, strict=True)):
            if digest not in page_of:
                page_of[digest] = page
                self._hash_of[group][page] = digest
                content = tokens[index * page_bytes : (index + 1) * page_bytes]
                self._named[group][digest] = _Named(parent, content)
                stored.append(Stored(group, parent, (digest,), content))
                new.append(page)
            parent = digest
        if new:
            self._append_event(tuple(join(stored)), ())
        return new

    def forget(self, group: int, pages: Iterable[int]) -> list[int]:
        """Remove the names of these pages, which will hold other content or may hold wrong content, and tell listeners.
        Returns the pages that had a name."""
        had, removed = list[int](), list[bytes]()
        for page in pages:
            digest = self._hash_of[group].pop(page, None)
            if digest is not None:
                del self._page_of[group][digest], self._named[group][digest]
                had.append(page)
                removed.append(digest)
        if removed:
            self._append_event((), (Removed(group, tuple(removed)),))
        return had

    def of(self, group: int, pages: Iterable[int]) -> list[tuple[bytes, bytes]]:
        """Return the name of each page that has one, and the name of its parent."""
        digests = [self._hash_of[group].get(page) for page in pages]
        return [(digest, self._named[group][digest].parent) for digest in digests if digest is not None]

    def snapshot(self, piece: int = 1024) -> Iterator[list[Stored]]:
        """Yield all named pages as chains, `piece` pages at a time. Pages that change meanwhile may be missing or
        outdated. The events after the value that `sequence` had at the beginning correct that."""
        for group, named in enumerate(self._named):
            digests = list(named)
            for start in range(0, len(digests), piece):
                held = ((digest, named.get(digest)) for digest in digests[start : start + piece])
                yield join(Stored(group, n.parent, (digest,), n.tokens) for digest, n in held if n is not None)

    def events_after(self, sequence: int) -> list[PageEvent]:
        """Return the events later than `sequence`, the oldest first; none if it is the latest. Raises
        FailedPrecondition if some of them are no longer kept, or if `sequence` is later than any event."""
        if sequence == self.sequence:
            return []
        if sequence > self.sequence or not self._events or self._events[0].sequence > sequence + 1:
            raise FailedPrecondition(
                "PAGE_EVENTS_GAP", f"Events after {sequence} are gone.", "Watch again from a snapshot."
            )
        return list(islice(self._events, sequence + 1 - self._events[0].sequence, None))

    def check_integrity(self) -> None:
        """Raise AssertionError unless each page with a name is the page of this name, and exactly these names have a
        parent and tokens."""
        for hash_of, page_of, named in zip(self._hash_of, self._page_of, self._named, strict=True):
            require({digest: page for page, digest in hash_of.items()} == page_of, "a page and its name disagree")
            require(page_of.keys() == named.keys(), "a name without content, or content without a name")

    @property
    def num_named(self) -> int:
        """Pages with a name."""
        return sum(len(hash_of) for hash_of in self._hash_of)

    def _append_event(self, stored: tuple[Stored, ...], removed: tuple[Removed, ...]) -> None:
        """Add an event with the next sequence number to those that are kept, and call the listeners."""
        self.sequence += 1
        self._events.append(PageEvent(self.sequence, stored, removed))
        for listener in self.listeners:
            listener()


def join(stored: Iterable[Stored]) -> list[Stored]:
    """Join single pages into chains: neighbours of which one is the parent of the other become one entry."""
    chains: list[tuple[int, bytes, list[bytes], list[bytes]]] = []
    for one in stored:
        if chains and chains[-1][0] == one.group and one.parent and chains[-1][2][-1] == one.parent:
            chains[-1][2].extend(one.hashes)
            chains[-1][3].append(one.tokens)
        else:
            chains.append((one.group, one.parent, list(one.hashes), [one.tokens]))
    return [Stored(group, parent, tuple(hashes), b"".join(tokens)) for group, parent, hashes, tokens in chains]

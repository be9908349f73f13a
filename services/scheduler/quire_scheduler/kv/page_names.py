"""Which device pages hold which named content, told to watchers as Stored and Removed events.

A page is named when all of it is computed; it loses its name when it is evicted. One page per content is enough: a
second one stays without a name. Knows nothing of requests or of who watches.
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
    """A chain of pages that are now held; `parent` is the hash before the first, `tokens` little-endian int32."""

    group: int
    parent: bytes
    hashes: tuple[bytes, ...]
    tokens: bytes


class Removed(NamedTuple):
    """Pages that are no longer held."""

    group: int
    hashes: tuple[bytes, ...]


class PageEvent(NamedTuple):
    """One change; `sequence` grows by one."""

    sequence: int
    stored: tuple[Stored, ...]
    removed: tuple[Removed, ...]


class _Named(NamedTuple):
    parent: bytes
    tokens: bytes


class PageNames:
    """Names of pages and the bounded tail of their events. `listeners` are called after each event."""

    def __init__(self, groups: int, tail: int) -> None:
        self.sequence = 0
        self.listeners: list[Callable[[], None]] = []
        self._events: deque[PageEvent] = deque(maxlen=tail)
        self._hash_of: list[dict[int, bytes]] = [{} for _ in range(groups)]
        self._page_of: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._named: list[dict[bytes, _Named]] = [{} for _ in range(groups)]

    def pages(self, group: int) -> Mapping[bytes, int]:
        """The page of each content, as a view."""
        return self._page_of[group]

    def name(
        self, group: int, pages: Sequence[int], parent: bytes, hashes: Sequence[bytes], tokens: bytes
    ) -> list[int]:
        """Name the pages by their hashes, the first being the child of `parent`, and tell listeners. A content that
        another page holds already is not named twice. Returns the pages that got a name."""
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
            self._tell(tuple(join(stored)), ())
        return new

    def forget(self, group: int, pages: Iterable[int]) -> list[int]:
        """Remove the names of pages that will hold something else, and tell listeners. Returns the pages that had
        one."""
        had, removed = list[int](), list[bytes]()
        for page in pages:
            digest = self._hash_of[group].pop(page, None)
            if digest is not None:
                del self._page_of[group][digest], self._named[group][digest]
                had.append(page)
                removed.append(digest)
        if removed:
            self._tell((), (Removed(group, tuple(removed)),))
        return had

    def of(self, group: int, pages: Iterable[int]) -> list[tuple[bytes, bytes]]:
        """Names of the pages that have one, each with its parent's."""
        digests = [self._hash_of[group].get(page) for page in pages]
        return [(digest, self._named[group][digest].parent) for digest in digests if digest is not None]

    def snapshot(self, piece: int = 1024) -> Iterator[list[Stored]]:
        """Yield all named pages as chains, `piece` pages at a time. Pages that change meanwhile may be missing or
        outdated; the events after the `sequence` at the beginning correct that."""
        for group, named in enumerate(self._named):
            digests = list(named)
            for start in range(0, len(digests), piece):
                held = ((digest, named.get(digest)) for digest in digests[start : start + piece])
                yield join(Stored(group, n.parent, (digest,), n.tokens) for digest, n in held if n is not None)

    def after(self, sequence: int) -> list[PageEvent]:
        """Return the events later than `sequence`. Raises FailedPrecondition where the tail no longer reaches back to
        it."""
        if sequence == self.sequence:
            return []
        if sequence > self.sequence or not self._events or self._events[0].sequence > sequence + 1:
            raise FailedPrecondition(
                "PAGE_EVENTS_GAP", f"Events after {sequence} are gone.", "Watch again from a snapshot."
            )
        return list(islice(self._events, sequence + 1 - self._events[0].sequence, None))

    def check_integrity(self) -> None:
        """Raise AssertionError where pages and names disagree."""
        for hash_of, page_of, named in zip(self._hash_of, self._page_of, self._named, strict=True):
            require({digest: page for page, digest in hash_of.items()} == page_of, "a page and its name disagree")
            require(page_of.keys() == named.keys(), "a name without content, or content without a name")

    @property
    def num_named(self) -> int:
        """Pages with a name."""
        return sum(len(hash_of) for hash_of in self._hash_of)

    def _tell(self, stored: tuple[Stored, ...], removed: tuple[Removed, ...]) -> None:
        self.sequence += 1
        self._events.append(PageEvent(self.sequence, stored, removed))
        for listener in self.listeners:
            listener()


def join(stored: Iterable[Stored]) -> list[Stored]:
    """Join single pages into chains: neighbours where one is the other's parent become one entry."""
    chains: list[tuple[int, bytes, list[bytes], list[bytes]]] = []
    for one in stored:
        if chains and chains[-1][0] == one.group and one.parent and chains[-1][2][-1] == one.parent:
            chains[-1][2].extend(one.hashes)
            chains[-1][3].append(one.tokens)
        else:
            chains.append((one.group, one.parent, list(one.hashes), [one.tokens]))
    return [Stored(group, parent, tuple(hashes), b"".join(tokens)) for group, parent, hashes, tokens in chains]

"""Which device pages hold which named content, told to watchers as Stored and Removed events.

A page is named when it is full and its hash is known; it loses its name with its last reference, since then it may be
overwritten. Knows nothing of requests or of who watches.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from quire_common.errors import FailedPrecondition
from quire_scheduler.invariant import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MEDIUM = "device"


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
        self._copies: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._named: list[dict[bytes, _Named]] = [{} for _ in range(groups)]

    def name(self, group: int, pages: Sequence[int], hashes: Sequence[bytes], tokens: bytes) -> None:
        """The pages, the first of their sequence, hold the content that the hashes name."""
        page_bytes = len(tokens) // max(len(pages), 1)
        new: list[Stored] = []
        for index, (page, digest) in enumerate(zip(pages, hashes, strict=True)):
            if page in self._hash_of[group]:
                continue
            self._hash_of[group][page] = digest
            copies = self._copies[group].get(digest, 0)
            self._copies[group][digest] = copies + 1
            if not copies:
                content = tokens[index * page_bytes : (index + 1) * page_bytes]
                parent = hashes[index - 1] if index else b""
                self._named[group][digest] = _Named(parent, content)
                new.append(Stored(group, parent, (digest,), content))
        if new:
            self._tell(tuple(join(new)), ())

    def forget(self, group: int, pages: Iterable[int]) -> None:
        """The pages lost their last reference."""
        removed = []
        for page in pages:
            digest = self._hash_of[group].pop(page, None)
            if digest is None:
                continue
            self._copies[group][digest] -= 1
            if not self._copies[group][digest]:
                del self._copies[group][digest], self._named[group][digest]
                removed.append(digest)
        if removed:
            self._tell((), (Removed(group, tuple(removed)),))

    def snapshot(self) -> list[Stored]:
        """All that is held now, as of `sequence`."""
        return [
            chain
            for group, named in enumerate(self._named)
            for chain in join(Stored(group, n.parent, (digest,), n.tokens) for digest, n in named.items())
        ]

    def after(self, sequence: int) -> list[PageEvent]:
        """Events later than `sequence`; raises FailedPrecondition where the tail no longer reaches back to it."""
        if sequence == self.sequence:
            return []
        if sequence > self.sequence or not self._events or self._events[0].sequence > sequence + 1:
            raise FailedPrecondition(
                "PAGE_EVENTS_GAP", f"Events after {sequence} are gone.", "Watch again from a snapshot."
            )
        return [event for event in self._events if event.sequence > sequence]

    def check_integrity(self) -> None:
        """Counts agree with names."""
        for group, hash_of in enumerate(self._hash_of):
            counts: dict[bytes, int] = {}
            for digest in hash_of.values():
                counts[digest] = counts.get(digest, 0) + 1
            require(counts == self._copies[group], "copies of named pages were miscounted")
            require(counts.keys() == self._named[group].keys(), "a name without pages, or pages without a name")

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
    """Chains out of single pages: neighbours where one is the other's parent become one entry."""
    chains: list[tuple[int, bytes, list[bytes], list[bytes]]] = []
    for one in stored:
        if chains and chains[-1][0] == one.group and one.parent and chains[-1][2][-1] == one.parent:
            chains[-1][2].extend(one.hashes)
            chains[-1][3].append(one.tokens)
        else:
            chains.append((one.group, one.parent, list(one.hashes), [one.tokens]))
    return [Stored(group, parent, tuple(hashes), b"".join(tokens)) for group, parent, hashes, tokens in chains]

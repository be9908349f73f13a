"""Eviction policies by name, which choose the page to evict. They know nothing of memory, files or leases, and are not
thread-safe.

lru   least recently used
arc   adaptive replacement (Megiddo and Modha, 2003) in bytes: pages used once and pages used again have queues of
      their own, and what was evicted too early shifts room between them, so that a scan cannot empty the cache
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from quire_common.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from quire_common.pages import PageKey


class EvictionPolicy(Protocol):
    """The order in which a tier evicts its pages. A held page is never evicted. Raises KeyError for unknown pages."""

    def __iter__(self) -> Iterator[PageKey]:
        """Yield the pages that are not held."""

    def add(self, key: PageKey, size: int, *, held: bool = False) -> None:
        """Add a new page, as the most recently used one. `held`: the page is held from the start; this does not count
        as a second use."""

    def hold(self, key: PageKey) -> None:
        """Note a use of the page, which is then not evicted until `release`."""

    def release(self, key: PageKey) -> None:
        """Note that the page is no longer held. It counts as the one used last."""

    def use(self, key: PageKey) -> None:
        """Note another use of the page. Does nothing if the page is held."""

    def refresh(self, key: PageKey) -> None:
        """Move the page to the end of its queue, without counting a use. Does nothing if the page is held."""

    def discard(self, key: PageKey) -> None:
        """Forget a page that was removed for another reason than lack of room."""

    def evict(self, spared: Container[PageKey] = ()) -> PageKey | None:
        """Choose and forget a page that is neither held nor spared; None if there is none."""


class LruPolicy:
    def __init__(self, capacity_bytes: int) -> None:
        self._order: OrderedDict[PageKey, None] = OrderedDict()
        self._held: set[PageKey] = set()

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._order)

    def add(self, key: PageKey, size: int, *, held: bool = False) -> None:
        """Add a page as the one used last; a held one is not evicted before `release`."""
        if held:
            self._held.add(key)
        else:
            self._order[key] = None

    def hold(self, key: PageKey) -> None:
        del self._order[key]
        self._held.add(key)

    def release(self, key: PageKey) -> None:
        self._held.remove(key)
        self._order[key] = None

    def use(self, key: PageKey) -> None:
        if key not in self._held:
            self._order.move_to_end(key)

    def refresh(self, key: PageKey) -> None:
        self.use(key)

    def discard(self, key: PageKey) -> None:
        """Forget a page, held or not. Raises KeyError for an unknown page."""
        if key in self._held:
            self._held.remove(key)
        else:
            del self._order[key]

    def evict(self, spared: Container[PageKey] = ()) -> PageKey | None:
        """Evict the least recently used page that is neither held nor spared, and return it; None if there is none."""
        victim = next((key for key in self._order if key not in spared), None)
        if victim is not None:
            del self._order[victim]
        return victim


class _Queue(OrderedDict["PageKey", int]):
    """Sizes by key, oldest first, with their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = 0

    def push(self, key: PageKey, size: int) -> None:
        self[key] = size
        self.total_bytes += size

    def remove(self, key: PageKey) -> int:
        size = self.pop(key)
        self.total_bytes -= size
        return size

    def trim(self, limit_bytes: int) -> None:
        """Forget the oldest until the rest fits."""
        while self and self.total_bytes > limit_bytes:
            self.remove(next(iter(self)))


class ArcPolicy:
    """Ghosts remember keys and sizes of evicted pages, of `capacity_bytes` at most per queue."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._recent, self._frequent = _Queue(), _Queue()
        self._recent_ghosts, self._frequent_ghosts = _Queue(), _Queue()
        self._held: dict[PageKey, tuple[int, _Queue]] = {}
        self._recent_target = 0

    def __iter__(self) -> Iterator[PageKey]:
        yield from self._recent
        yield from self._frequent

    def add(self, key: PageKey, size: int, *, held: bool = False) -> None:
        """Add a new page; a `held` one is not evicted before `release`. One that comes back soon after its eviction
        joins the frequent queue, and the queue that it was evicted from gets a larger share of the room."""
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        queue = self._recent
        if key in recent:
            shift = size * max(1, frequent.total_bytes // recent.total_bytes)
            self._recent_target = min(self._capacity, self._recent_target + shift)
            recent.remove(key)
            queue = self._frequent
        elif key in frequent:
            shift = size * max(1, recent.total_bytes // frequent.total_bytes)
            self._recent_target = max(0, self._recent_target - shift)
            frequent.remove(key)
            queue = self._frequent
        if held:
            self._held[key] = (size, queue)
        else:
            queue.push(key, size)

    def hold(self, key: PageKey) -> None:
        self._held[key] = (self._queue(key).remove(key), self._frequent)

    def release(self, key: PageKey) -> None:
        size, queue = self._held.pop(key)
        queue.push(key, size)

    def use(self, key: PageKey) -> None:
        if key not in self._held:
            self._frequent.push(key, self._queue(key).remove(key))

    def refresh(self, key: PageKey) -> None:
        if key not in self._held:
            self._queue(key).move_to_end(key)

    def discard(self, key: PageKey) -> None:
        if self._held.pop(key, None) is None:
            self._queue(key).remove(key)

    def evict(self, spared: Container[PageKey] = ()) -> PageKey | None:
        """Evict the oldest page that is neither held nor spared. It comes from the recent queue if that exceeds its
        target, else from the frequent queue; if that queue has no such page, from the other one. The page becomes a
        ghost. Returns None if there is no such page."""
        queues = [(self._recent, self._recent_ghosts), (self._frequent, self._frequent_ghosts)]
        if self._recent.total_bytes <= self._recent_target:
            queues.reverse()
        for queue, ghosts in queues:
            victim = next((key for key in queue if key not in spared), None)
            if victim is not None:
                ghosts.push(victim, queue.remove(victim))
                self._recent_ghosts.trim(self._capacity)
                self._frequent_ghosts.trim(self._capacity)
                return victim
        return None

    def _queue(self, key: PageKey) -> _Queue:
        return self._recent if key in self._recent else self._frequent


POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = {"lru": LruPolicy, "arc": ArcPolicy}


def make_policy(name: str, capacity_bytes: int) -> EvictionPolicy:
    """A policy by its name; raises ConfigError that lists what there is."""
    if name not in POLICIES:
        raise ConfigError("BAD_VALUE", f"There is no policy {name!r}.", f"Choose one of {', '.join(POLICIES)}.")
    return POLICIES[name](capacity_bytes)

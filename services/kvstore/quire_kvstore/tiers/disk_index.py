"""DiskIndex: the pages on the disk, the room that they take, and the order of their eviction. It knows nothing of
files. Thread-safe.

A size is a page's own size; the room of a page is counted in whole blocks. `begin_write` takes the room before a page
is written, and `finish_write` follows.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from quire_common.errors import require
from quire_kvstore.eviction import make_policy
from quire_kvstore.tiers.aligned import whole_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from quire_common.pages import PageKey


class DiskIndex:
    """Pages that take `capacity_bytes` at most, apart from pages whose files could not be removed."""

    def __init__(self, capacity_bytes: int, policy: str) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._policy = make_policy(policy, capacity_bytes)
        self._sizes: dict[PageKey, int] = {}
        self._being_written: dict[PageKey, int] = {}
        self._being_removed: dict[PageKey, int] = {}
        # Pages of `_sizes` whose files could not be removed. They may be what goes beyond the capacity.
        self._not_removed: set[PageKey] = set()
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._sizes

    @property
    def used_bytes(self) -> int:
        """Room of pages on the disk and of pages being written."""
        return self._used_bytes

    def size(self, key: PageKey) -> int | None:
        """Return the size in bytes of a page that is there; None if it is not."""
        return self._sizes.get(key)

    def held_keys(self) -> list[PageKey]:
        """Return the keys of all pages, in the order of the eviction policy: with `lru`, the page that is evicted first
        is the first one; with `arc`, this holds within each of its two queues."""
        with self._lock:
            return list(self._policy)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Mark the keys that are here as used, in this order."""
        with self._lock:
            for key in keys:
                if key in self._sizes:
                    self._policy.use(key)

    def refresh(self, keys: Iterable[PageKey]) -> None:
        """Move the keys that are here to the end of the order, without counting a use."""
        with self._lock:
            for key in keys:
                if key in self._sizes:
                    self._policy.refresh(key)

    def begin_write(self, key: PageKey, size: int) -> list[PageKey] | None:
        """Take room for a page that is about to be written, and evict as many pages as that needs. Returns the evicted
        pages: the caller removes their files and then calls `finish_removal`. Returns None, with no change, if the page
        is stored, is being written or removed, or does not fit beside the pages being written."""
        with self._lock:
            if key in self._sizes or key in self._being_written or key in self._being_removed:
                return None
            room = whole_blocks(size)
            if _room(self._being_written) + room > self.capacity_bytes:
                return None
            victims = self._evict(self._used_bytes + room - self.capacity_bytes)
            self._being_written[key] = size
            self._used_bytes += room
            return victims

    def finish_write(self, key: PageKey, *, written: bool) -> None:
        """End a `begin_write`. If `written`, the page is there, as the one used last; else its room is free again."""
        with self._lock:
            size = self._being_written.pop(key)
            if written:
                self._add(key, size)
            else:
                self._used_bytes -= whole_blocks(size)

    def evict(self, room: int) -> list[PageKey]:
        """Evict pages until they free `room` bytes, or none is left, and return them. The caller removes their files,
        then calls `finish_removal`."""
        with self._lock:
            return self._evict(room)

    def finish_removal(self, keys: Iterable[PageKey], *, removed: bool) -> None:
        """End the removal of evicted pages. If not `removed`, their files are still on the disk. The index then lists
        the pages again, as those used last, and counts their room, even beyond the capacity."""
        with self._lock:
            for key in keys:
                size = self._being_removed.pop(key)
                if not removed:
                    self._add(key, size)
                    self._not_removed.add(key)
                    self._used_bytes += whole_blocks(size)

    def forget(self, key: PageKey) -> bool:
        """Remove a page that is not on the disk any more. Returns whether it was here."""
        with self._lock:
            size = self._sizes.pop(key, None)
            if size is None:
                return False
            self._policy.discard(key)
            self._not_removed.discard(key)
            self._used_bytes -= whole_blocks(size)
            return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages here and pages being written take `used_bytes` together, `used_bytes` are
        within the capacity but for pages whose files could not be removed, the eviction policy lists each page here
        once and no other, and no page here is being written or removed."""
        with self._lock:
            order = list(self._policy)
            listed = len(order) == len(self._sizes) and set(order) == set(self._sizes)
            require(listed, "the policy lists each page once, and no other")
            counted = _room(self._sizes) + _room(self._being_written)
            require(self._used_bytes == counted, "used bytes were miscounted")
            not_removed = sum(whole_blocks(self._sizes[key]) for key in self._not_removed)
            require(counted - not_removed <= self.capacity_bytes, "pages go beyond the capacity without a cause")
            changing = self._being_written.keys() | self._being_removed.keys()
            require(not self._sizes.keys() & changing, "a page is here that is being written or removed")

    def _evict(self, room: int) -> list[PageKey]:
        """Take pages out of the index until these free `room` bytes, or no page can be evicted, and return them. The
        pages count as being removed from now on."""
        victims: list[PageKey] = []
        while room > 0:
            key = self._policy.evict()
            if key is None:
                break
            size = self._being_removed[key] = self._sizes.pop(key)
            self._not_removed.discard(key)
            freed = whole_blocks(size)
            self._used_bytes -= freed
            room -= freed
            victims.append(key)
        return victims

    def _add(self, key: PageKey, size: int) -> None:
        self._sizes[key] = size
        self._policy.add(key, whole_blocks(size))


def _room(sizes: Mapping[PageKey, int]) -> int:
    return sum(map(whole_blocks, sizes.values()))

"""Which part of a prompt the caches have, per replica, from the page directory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from quire_router.pages.page_directory import PageDirectory
    from quire_router.placement.replica_table import ReplicaTable, Rows
    from quire_router.placement.wish import Wish


class PrefixView:
    """`stores` are the numbers of kvstores in the directory: what one of them has, every replica may load."""

    def __init__(
        self, table: ReplicaTable, directory: PageDirectory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stores: dict[str, int] = {}
        self._table = table
        self._directory = directory
        self._clock = clock

    def cached(self, wish: Wish, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens that each row's device has, and tokens that a kvstore has for it. The last token never counts."""
        device, stored = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        if wish.sequence.skip_cache_read:
            return device, stored
        pools = self._table.pool[rows]
        for number in np.unique(pools).tolist() if len(self._table.pools) > 1 else (0,):
            if not self._table.knows_pages(number):
                continue
            size, members = self._table.pools[number].page_size, pools == number
            depths, most = self._depths(wish, number), wish.most_hits(size)
            device[members] = np.minimum(depths[self._table.holder[rows[members]]] * size, most)
            found = max((int(depths[store]) for store in self.stores.values()), default=0)
            stored[members] = min(found * size, most)
        return device, stored

    def expect(self, wish: Wish, row: int) -> None:
        """The wish goes to a row: its pages will be there."""
        holder, pool = int(self._table.holder[row]), int(self._table.pool[row])
        if holder >= 0 and self._table.knows_pages(pool):
            for keys in wish.chains(self._table.pools[pool]):
                self._directory.expect(holder, keys, self._clock())

    def _depths(self, wish: Wish, number: int) -> NDArray[np.int32]:
        """Pages by holder, and none for those that have no number: -1 is the last element."""
        depths = wish.depths.get(number)
        if depths is None:
            found = self._directory.prefixes(wish.chains(self._table.pools[number]), self._clock())
            depths = wish.depths[number] = np.append(found, np.int32(0))
        return depths

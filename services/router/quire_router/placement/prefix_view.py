"""PrefixView: says which part of a prompt the caches of each replica have, according to the page directory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from quire_router.pages.page_directory import Prefixes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from quire_router.pages.page_directory import PageDirectory
    from quire_router.placement.placement_request import PlacementRequest
    from quire_router.placement.replica_table import ReplicaTable, Rows


class PrefixView:
    """`stores`: by instance, the numbers of kvstores in the directory. Every replica may load the pages of any of them.
    `lives`: by instance, the life (boot id) of each kvstore of which the directory has every page."""

    def __init__(
        self, table: ReplicaTable, directory: PageDirectory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stores: dict[str, int] = {}
        self.lives: dict[str, int] = {}
        self._table = table
        self._directory = directory
        self._clock = clock

    def cached(self, request: PlacementRequest, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return, for each row, the number of the request's leading tokens that its device has, and the largest number
        that a kvstore has, both in full pages. Pages that are only expected at the row count, too. The last token never
        counts. All are 0 for a sequence that reads no cache, and for rows of a pool whose names of pages no replica has
        reported. A row without a number in the directory has 0 on its device."""
        device, stored = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        if not request.sequence.reads_cache:
            return device, stored
        if len(self._table.pools) == 1:
            return self._cached(request, rows, 0) if self._table.knows_pages(0) else (device, stored)
        pools = self._table.pool[rows]
        for number in np.unique(pools).tolist():
            if self._table.knows_pages(number):
                members = pools == number
                device[members], stored[members] = self._cached(request, rows[members], number)
        return device, stored

    def held(self, request: PlacementRequest, row: int) -> int | None:
        """Return the number of leading tokens in full pages that the holder with most of them has, or is expected to
        have; 0 if nobody has the first page. The row's kvstore has no page beyond these. Returns None if the directory
        does not know all pages of that kvstore, if there is none, if the sequence reads no cache, or if no replica of
        the row's pool has reported its names of pages.

        Pages of engines count too, because a page that an engine has, or will compute, may reach a kvstore before the
        kvstore's event comes.
        """
        boot_id, pool = int(self._table.kvstore[row]), int(self._table.pool[row])
        if not boot_id or boot_id not in self.lives.values():
            return None
        if not request.sequence.reads_cache or not self._table.knows_pages(pool):
            return None
        # Most prompts are nobody's, and with one replica nothing has been looked up so far.
        if pool not in request.found and not self._directory.is_held(
            request.head(self._table.pools[pool]), self._clock()
        ):
            return 0
        return int(self._found(request, pool).depths.max()) * self._table.pools[pool].page_size

    def expect(self, request: PlacementRequest, row: int) -> None:
        """Record in the directory that the row will have the request's pages soon, since the request goes there.
        Leading pages that the row has reported, according to an earlier lookup for this request, are left out. Does
        nothing if the router does not know the row's pages."""
        holder, pool = int(self._table.holder[row]), int(self._table.pool[row])
        if holder >= 0 and self._table.knows_pages(pool):
            found = request.found.get(pool)
            # What it told of needs no expectation.
            known = min(found.reported, int(found.depths[holder])) if found is not None else 0
            for keys in request.chains(self._table.pools[pool]):
                self._directory.expect(holder, keys[known:], self._clock())

    def _cached(
        self, request: PlacementRequest, rows: Rows, number: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the cached tokens of rows that belong to the pool `number`: for each row those of its device, and
        those of the kvstore that has most. Both count full pages, without the last token."""
        size = self._table.pools[number].page_size
        depths, most = self._found(request, number).depths, request.most_hits(size)
        device: NDArray[np.int64] = np.minimum(depths[self._table.holder[rows]] * size, most)
        found = max((int(depths[store]) for store in self.stores.values()), default=0)
        return device, np.full(len(rows), min(found * size, most), np.int64)

    def _found(self, request: PlacementRequest, number: int) -> Prefixes:
        """Return how many of the request's leading pages each holder of the pool `number` has. The directory is asked
        once per request. The last element is 0; a row without a holder reads it by the index -1."""
        found = request.found.get(number)
        if found is None:
            depths, reported = self._directory.prefixes(request.chains(self._table.pools[number]), self._clock())
            found = request.found[number] = Prefixes(np.append(depths, 0).astype(np.int64), reported)
        return found

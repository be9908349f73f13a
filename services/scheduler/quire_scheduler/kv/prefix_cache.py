"""PrefixCache: finds device pages that hold, or will hold, the beginning of a sequence, so that no prefix is computed
twice.

A page has a name once all of it is computed or loaded (see `page_names`), and keeps the name until it is evicted or its
content is suspect. Before that, a page is promised: from the start of the request that will fill it, other requests may
start on it, and the worker makes them wait until the page is ready. If the request leaves without filling the page, its
promise is withdrawn, the worker ends the requests that wait for the page (PAGES_LOST), and these start again. Only
pages that are full, or will be, are shared; one request at a time writes a page.

This module does not decide which request starts when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire_common.errors import require
from quire_scheduler.core.request import State
from quire_scheduler.kv.page_identity import identify, most_hits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quire_scheduler.core.request import Request
    from quire_scheduler.kv.page_names import PageNames
    from quire_scheduler.kv.page_pools import PagePools


class Hit(NamedTuple):
    """The pages, by KV group, that were found for the beginning of a sequence. The first `ready` of them hold their
    content already; the others are promised."""

    tables: tuple[list[int], ...]
    ready: int

    @property
    def pages(self) -> int:
        """The number of pages in each group."""
        return len(self.tables[0])

    def whole(self) -> Hit:
        """Return the hit without the promised pages."""
        return Hit(tuple(table[: self.ready] for table in self.tables), self.ready)


class _Promise(NamedTuple):
    page: int
    owner: Request


class PrefixCache:
    """The index of one core's pages by content. If it is not `enabled`, nothing is found and nothing is named. With
    `identifies` it still tracks which pages of a request are full, for the kvstore."""

    def __init__(self, pools: PagePools, names: PageNames, *, enabled: bool, identifies: bool) -> None:
        self.enabled = enabled
        self._identifies = identifies
        self._pools = pools
        self._names = names
        self._promised: list[dict[bytes, _Promise]] = [{} for _ in range(pools.groups)]
        # Pages that a load is filling; the load may outlive its request.
        self._loading: list[set[int]] = [set() for _ in range(pools.groups)]
        # By uid: how many leading pages of the request's last run are known to hold their content. Kept until no step
        # of the run can be reported any more.
        self._ready_pages: dict[int, int] = {}
        # Started requests that wait for promised pages.
        self._awaiting: set[Request] = set()
        self._miss = Hit(tuple([] for _ in range(pools.groups)), 0)
        # The last result of `match`, and the key that it depends on: a queue head that waits for pages is matched again
        # and again.
        self._found, self._found_for = self._miss, (0, 0, 0, 0)
        self._changes = 0

    def match(self, request: Request) -> Hit:
        """Return the longest prefix of the request whose pages are named (hold their content), or promised by another
        request that will fill them, in every KV group. The page of the last token is never part of it. The search
        extends the request's page hashes to all of its full pages. The hit is empty if the cache is off or the request
        does not read it."""
        if not self.enabled or not request.sequence.reads_cache:
            return self._miss
        key = (request.uid, request.known_len, self._names.sequence, self._changes)
        if key != self._found_for:
            self._found, self._found_for = self._find(request), key
        return self._found

    def ready_pages(self, request: Request) -> int:
        """Return how many leading pages of the request's last run are known to hold their content."""
        return self._ready_pages.get(request.uid, 0)

    def restart(self, request: Request, ready: int) -> None:
        """Note that the request's table begins anew, with `ready` pages that hold their content."""
        self._ready_pages[request.uid] = ready

    def forget(self, request: Request) -> None:
        """Drop the record of a request that has ended, when no step of it can be reported any more."""
        self._ready_pages.pop(request.uid, None)

    def begin(self, request: Request, hit: Hit, loaded: int) -> None:
        """Handle the start of a request on the pages of `hit`, followed by its own pages. Its page hashes are extended
        to all of its full pages. Its own full pages are promised, unless pages of that content are named or promised
        already. Other requests may start on promised pages. The kvstore loads the pages before index `loaded`, so that
        their promises stay if the request leaves. If pages of `hit` are only promised, note that the request awaits
        them. If the cache is off, only the number of ready pages is noted."""
        self.restart(request, hit.ready)
        if not self.enabled:
            return
        if hit.ready < hit.pages:
            self._awaiting.add(request)
        identify(request, self._pools.page_size)
        for group, table in enumerate(request.tables):
            named, promised = self._names.pages(group), self._promised[group]
            for index in range(hit.pages, len(request.hashes)):
                digest, page = request.hashes[index], table[index]
                if digest not in named and digest not in promised:
                    promised[digest] = _Promise(page, request)
                    if index < loaded:
                        self._loading[group].add(page)
        self._changes += 1

    def computed(self, request: Request, positions: int) -> None:
        """Note that the request's pages hold the KV of its first `positions` positions. Pages that have become full get
        their names, their promises are removed, and the request awaits no promised page any more. If the cache is off,
        only the number of full pages is noted. Nothing happens if no further page has become full."""
        end = min(positions // self._pools.page_size, len(request.hashes))
        first = self.ready_pages(request)
        if end <= first:
            return
        self._ready_pages[request.uid] = end
        if self.enabled:
            self._awaiting.discard(request)
            for group, table in enumerate(request.tables):
                self._name(request, group, first, table[first:end])

    def loaded(self, request: Request, group: int, first: int, pages: Sequence[int], arrived: int) -> None:
        """Handle the end of a load for the request, which may have left: name the first `arrived` pages. The promise of
        each other page passes to the oldest request that holds the page, since that one computes it; if no request
        holds the page, its promise is removed. Nothing happens if the cache is off."""
        if not self.enabled:
            return
        self._loading[group].difference_update(pages)
        self._name(request, group, first, pages[:arrived])
        promised = self._promised[group]
        self._changes += arrived < len(pages)
        for index in range(first + arrived, first + len(pages)):
            digest, page = request.hashes[index], pages[index - first]
            promise = promised.get(digest)
            if promise is None or promise.page != page:
                continue
            # Among the requests that hold the page, the worker lets the oldest compute it.
            holders = [other for other in (request, *self._awaiting) if _holds(other, group, index, page)]
            if holders:
                promised[digest] = _Promise(page, min(holders, key=lambda holder: holder.order_key))
            else:
                del promised[digest]

    def leave(self, request: Request, positions: int) -> None:
        """Handle a request that is releasing its pages. Name the pages that its `positions` computed tokens fill.
        Withdraw the promises of pages that it has not filled and no load will fill, and the promises of requests that
        wait for these pages. If the cache is off, only the number of full pages is noted, and without `identifies`,
        nothing is."""
        if not self._identifies:
            return
        identify(request, self._pools.page_size)
        self.computed(request, positions)
        if not self.enabled:
            return
        self._awaiting.discard(request)
        broken = self._withdraw(request)
        while broken:
            # A request that waits for a withdrawn page is lost too, and so are its own promises.
            doomed = [other for other in self._awaiting if not broken.isdisjoint(_held(other))]
            broken = {page for other in doomed for page in self._withdraw(other)}

    def drop_suspect_pages(self, request: Request, first: int) -> None:
        """Forget the names of the request's pages from page `first` on, which may hold wrong content; this content is
        not kept for reuse."""
        for group, table in enumerate(request.tables):
            self._pools.pools[group].drop(self._names.forget(group, table[first:]))

    def drop_suspect_content(self, request: Request, first: int) -> None:
        """Forget the names of the pages that hold the content of the request's pages from index `first` on, whichever
        pages these are; this content is not kept for reuse. The request has given up its own pages."""
        for group, pool in enumerate(self._pools.pools):
            named = self._names.pages(group)
            pages = [named[digest] for digest in request.hashes[first:] if digest in named]
            pool.drop(self._names.forget(group, pages))

    def awaits(self, request: Request) -> bool:
        """Whether the request was started on pages that have not all been filled, and has computed no page itself
        since."""
        ready = self.ready_pages(request) * self._pools.page_size
        return ready < request.expected_tokens and ready <= request.cached_tokens

    def check_integrity(self, requests: Iterable[Request], stopping: Iterable[Request]) -> None:
        """Raise AssertionError unless exactly the pages with a name are kept, and each promised page is referenced,
        does not have the promised name yet, and is in its owner's table or being loaded. Only started requests may
        await pages. No page may be at different indices of two tables, or still be written by two requests. Counts of
        ready pages must be of `requests`, or of `stopping`, of which a step may still be reported."""
        requests = list(requests)
        uids = {request.uid for request in (*requests, *stopping)}
        require(self._ready_pages.keys() <= uids, "pages are ready for nobody")
        self._names.check_integrity()
        for group, pool in enumerate(self._pools.pools):
            named = self._names.pages(group)
            require(set(named.values()) == pool.kept(), "pages with a name and pages that are kept differ")
            for digest, (page, owner) in self._promised[group].items():
                table = owner.tables[group] if owner.tables else []
                held = page in table or page in self._loading[group]
                require(held and pool.references(page) > 0, "a page is promised that nobody will fill")
                require(named.get(digest) != page, "a promise was kept and not withdrawn")
        require(all(request.state is State.STARTED for request in self._awaiting), "who has left awaits pages")
        self._check_shared([request for request in requests if request.tables])

    def _check_shared(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError if a page has different indices in two tables, or if two requests still write it."""
        size = self._pools.page_size
        for group in range(self._pools.groups):
            writers: dict[int, Request] = {}
            places: dict[int, int] = {}
            for request in requests:
                for index, page in enumerate(request.tables[group]):
                    require(places.setdefault(page, index) == index, f"page {page} is shared at different places")
                    if (index + 1) * size > max(request.cached_tokens, self.ready_pages(request) * size):
                        require(writers.setdefault(page, request) is request, f"page {page} has two writers")

    def _find(self, request: Request) -> Hit:
        """Return the longest prefix of which every KV group has all pages, each named or promised; `ready` of the hit
        counts the leading pages that are named in every group. The page of the last token is never part of it. The
        request's hashes are extended first."""
        identify(request, self._pools.page_size)
        most = ready = most_hits(request, self._pools.page_size)
        tables = list[list[int]]()
        for group, promised in enumerate(self._promised):
            named, table = self._names.pages(group), list[int]()
            for digest in request.hashes[:most]:
                page = named.get(digest)
                if page is None:
                    promise = promised.get(digest)
                    if promise is None:
                        break
                    page, ready = promise.page, min(ready, len(table))
                table.append(page)
            tables.append(table)
            most = len(table)
        return Hit(tuple(table[:most] for table in tables), min(ready, most))

    def _name(self, request: Request, group: int, first: int, pages: Sequence[int]) -> None:
        """Name the pages, which hold their content. The first is page `first` of the request. Only the content of pages
        that got a name is kept: another page may have the name already. The promises of all these pages are removed."""
        if not pages:
            return
        size, end = self._pools.page_size, first + len(pages)
        hashes, parent = request.hashes[first:end], request.hashes[first - 1] if first else b""
        tokens = request.ids(first * size, end * size).astype("<i4", copy=False).tobytes()
        self._pools.pools[group].keep(self._names.name(group, pages, parent, hashes, tokens))
        promised = self._promised[group]
        for digest, page in zip(hashes, pages, strict=True):
            promise = promised.get(digest)
            if promise is not None and promise.page == page:
                del promised[digest]

    def _withdraw(self, request: Request) -> set[tuple[int, int]]:
        """Remove the promises that the request has not kept and that no load will keep. Returns their pages as (group,
        page)."""
        broken = set[tuple[int, int]]()
        for group, promised in enumerate(self._promised):
            for digest in request.hashes[self.ready_pages(request) :]:
                promise = promised.get(digest)
                if promise is not None and promise.owner is request and promise.page not in self._loading[group]:
                    del promised[digest]
                    broken.add((group, promise.page))
        self._changes += bool(broken)
        return broken


def _holds(request: Request, group: int, index: int, page: int) -> bool:
    return bool(request.tables) and request.tables[group][index : index + 1] == [page]


def _held(request: Request) -> Iterable[tuple[int, int]]:
    return ((group, page) for group, table in enumerate(request.tables) for page in table)

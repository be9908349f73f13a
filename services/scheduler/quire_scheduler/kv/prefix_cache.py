"""Which device pages hold, or will hold, how a sequence begins: so that no prefix is computed twice, nor twice at once.

A page has a name once all of it is there (`page_names`), and keeps it until it is evicted. Before that, from the start
of the request that will fill it, it is promised: others may start on it, and the worker lets them wait until it is
ready. A request that leaves takes its unkept promises with it; who waits for them is ended by the worker (PAGES_LOST)
and starts again. Pages are shared whole: what a sequence writes is its own. Decides nothing of who starts when.
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
    """Pages by group, the first of the sequence's; the first `ready` of them hold their content already."""

    tables: tuple[list[int], ...]
    ready: int

    @property
    def pages(self) -> int:
        """How many, in each group."""
        return len(self.tables[0])

    def whole(self) -> Hit:
        """Without those that are promised."""
        return Hit(tuple(table[: self.ready] for table in self.tables), self.ready)


class _Promise(NamedTuple):
    page: int
    owner: Request


class PrefixCache:
    """The index of one core's pages by content. Without it (`enabled` False) nothing is found and nothing is named;
    which of a request's pages are full is known still where somebody asks (`identifies`)."""

    def __init__(self, pools: PagePools, names: PageNames, *, enabled: bool, identifies: bool) -> None:
        self.enabled = enabled
        self._identifies = identifies
        self._pools = pools
        self._names = names
        self._promised: list[dict[bytes, _Promise]] = [{} for _ in range(pools.groups)]
        # Pages that a move is filling: it outlives its request.
        self._loading: list[set[int]] = [set() for _ in range(pools.groups)]
        # By uid: leading pages of a request's run that are known to hold their content; kept until no step of the run
        # can be reported any more.
        self._ready_pages: dict[int, int] = {}
        # Started requests that count on promises.
        self._awaiting: set[Request] = set()
        self._miss = Hit(tuple([] for _ in range(pools.groups)), 0)
        # What was found last, and what it depends on: a head that waits for pages is looked at again and again.
        self._found, self._found_for = self._miss, (0, 0, 0, 0)
        self._changes = 0

    def match(self, request: Request) -> Hit:
        """Return the longest prefix of the request whose pages are named, or promised by another request, in every
        group."""
        if not self.enabled or not request.sequence.reads_cache:
            return self._miss
        key = (request.uid, request.known_len, self._names.sequence, self._changes)
        if key != self._found_for:
            self._found, self._found_for = self._find(request), key
        return self._found

    def ready_pages(self, request: Request) -> int:
        """Leading pages of the request's last run that are known to hold their content."""
        return self._ready_pages.get(request.uid, 0)

    def restart(self, request: Request, ready: int) -> None:
        """The request's table begins anew, with so many pages that hold their content."""
        self._ready_pages[request.uid] = ready

    def forget(self, request: Request) -> None:
        """The request has ended, and no step of it can be reported any more."""
        self._ready_pages.pop(request.uid, None)

    def begin(self, request: Request, hit: Hit, loaded: int) -> None:
        """Note that the request starts on `hit` and pages of its own after it, of which those before page `loaded` are
        loaded. Its own full pages are promised, so that others may start on them."""
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
        """Note that the KV of the request's first `positions` is in its pages; the full pages that are new get their
        names."""
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
        """Take the end of a load for the request, which may have left: name the first `arrived` pages. Of the others,
        each is promised by the oldest request that holds it and so computes it, or no longer promised."""
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
            # Of those who hold the page the oldest is left by the worker to compute it.
            holders = [other for other in (request, *self._awaiting) if _holds(other, group, index, page)]
            if holders:
                promised[digest] = _Promise(page, min(holders, key=lambda holder: holder.order_key))
            else:
                del promised[digest]

    def leave(self, request: Request, positions: int) -> None:
        """Name the request's pages that `positions` computed tokens fill, as it gives its pages up. Its unkept promises
        are withdrawn, with those of requests that count on them."""
        if not self._identifies:
            return
        identify(request, self._pools.page_size)
        self.computed(request, positions)
        if not self.enabled:
            return
        self._awaiting.discard(request)
        broken = self._withdraw(request)
        while broken:
            # Who counts on them is lost too, and so is what it promised.
            doomed = [other for other in self._awaiting if not broken.isdisjoint(_held(other))]
            broken = {page for other in doomed for page in self._withdraw(other)}

    def distrust(self, request: Request, first: int) -> None:
        """Forget the names of the request's pages from page `first` on, which may hold wrong content."""
        for group, table in enumerate(request.tables):
            self._pools.pools[group].drop(self._names.forget(group, table[first:]))

    def distrust_content(self, request: Request, first: int) -> None:
        """Forget the names of whichever pages hold the content of the request's pages from `first` on; it has given its
        own up."""
        for group, pool in enumerate(self._pools.pools):
            named = self._names.pages(group)
            pages = [named[digest] for digest in request.hashes[first:] if digest in named]
            pool.drop(self._names.forget(group, pages))

    def awaits(self, request: Request) -> bool:
        """Whether the request was started on pages of which not all have come, and has computed none of them."""
        ready = self.ready_pages(request) * self._pools.page_size
        return ready < request.expected_tokens and ready <= request.cached_tokens

    def check_integrity(self, requests: Iterable[Request], stopping: Iterable[Request]) -> None:
        """Raise AssertionError where names, promises and tables disagree, or where a shared page is not whole for all
        but its writer. `stopping`: requests of which a step may still be reported."""
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
        """Raise AssertionError where a page has different places in two tables, or two requests that still write it."""
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
        """Return the longest prefix whose pages are named or promised in every group; the page of the last token is
        never in it."""
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
        """Name the pages, which begin at the request's page `first` and hold their content; keep those that got a name,
        and remove their promises."""
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
        """Remove the promises that the request has not kept and no load will keep. Returns their pages as (group,
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

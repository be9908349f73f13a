"""Offload: stores device pages in the kvstore, so that they can be loaded after they have left the device.

The policy (--kvstore-offload) decides when pages are stored:

  write-through  once they are full, several of a sequence at once; pages missed then are stored before eviction
  on-evict       when they are about to be evicted
  selective      when a second request uses them
  off            never

Stores never delay steps: the number of pages on their way is bounded. Under write-through and selective, pages beyond
the bound are offered again while their request runs; pages that are still not stored when it leaves are counted as
dropped. This module knows nothing of lookups.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from quire_common.circuit_breaker import CircuitBreaker
from quire_common.credit import MoveKind
from quire_common.errors import require
from quire_common.sequence import RequestContext
from quire_scheduler.config import OFF, ON_EVICT, SELECTIVE
from quire_scheduler.kv.page_moves import Move

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quire_scheduler.config import SchedulerConfig
    from quire_scheduler.core.request import Request
    from quire_scheduler.core.stats import Stats
    from quire_scheduler.kv.page_moves import MoveEnd, PageMoves
    from quire_scheduler.kv.page_names import PageNames
    from quire_scheduler.kv.page_pools import PagePools
    from quire_scheduler.kv.prefix_cache import PrefixCache

# A request's full pages are stored when there are this many new ones.
BATCH_PAGES = 8
# A longer chain is stored by several moves, so that other moves run in between.
_MOVE_PAGES = 256
# Stores may hold 1/_SHARE of all pages in the background, and 1/_SWAP_SHARE when requests are preempted for lack of
# pages.
_SHARE, _SWAP_SHARE = 8, 2
_LEAST_SHARE = 2 * BATCH_PAGES
# The most hashes that are remembered because their pages in the kvstore may be damaged.
_MOST_QUARANTINED = 65536
# The window: pages that are examined before they are evicted. It is 1/_WINDOW of all pages, within the bounds, and it
# is examined anew each time a quarter of it was allocated.
_WINDOW, _LEAST_WINDOW, _MOST_WINDOW = 8, 16, 512
_NO_REQUEST = RequestContext("offload")


class _Chain(NamedTuple):
    """Consecutive pages of a sequence: each hash is the parent of the next. `tables` has the pages by KV group."""

    tables: tuple[list[int], ...]
    hashes: tuple[bytes, ...]

    def tail(self, pages: int) -> _Chain:
        """Return the last `pages` pages of the chain."""
        first = max(len(self.hashes) - pages, 0)
        return _Chain(tuple(table[first:] for table in self.tables), self.hashes[first:])


class Offload:
    """The stores of one core. Without a kvstore (`enabled` is False) nothing is stored."""

    def __init__(
        self,
        config: SchedulerConfig,
        pools: PagePools,
        names: PageNames,
        moves: PageMoves,
        cache: PrefixCache,
        stats: Stats,
        *,
        enabled: bool,
    ) -> None:
        self.enabled = enabled and config.kvstore_offload != OFF
        # Whether pages of running requests may be stored before they are evicted.
        self.early = self.enabled and config.kvstore_offload != ON_EVICT
        self._selective = config.kvstore_offload == SELECTIVE
        self._min_tokens = config.kvstore_min_tokens
        self._max_stores = config.kvstore_moves
        self._max_known = config.kvstore_known_pages
        self._pools = pools
        self._names = names
        self._moves = moves
        self._cache = cache
        self._breaker = CircuitBreaker(clock=lambda: self._now, name="kvstore_store")
        self._stats = stats
        self._now = 0.0
        # By uid: how many leading pages of a request's present run have been offered to the kvstore. Absent: none.
        self._offered: dict[int, int] = {}
        # Hashes of pages that the kvstore has or is being given; the least recently used come first.
        self._known: OrderedDict[bytes, None] = OrderedDict()
        # Hashes of pages whose sequence ended by an error; the oldest come first.
        self._quarantined: OrderedDict[bytes, None] = OrderedDict()
        self._boot_id = 0
        self._window = min(max(pools.capacity // _WINDOW, _LEAST_WINDOW), _MOST_WINDOW)
        # By group: the pool's count of allocated pages when the window was last examined.
        self._looked_at = [-self._window] * pools.groups
        # Not all pages of the window could be stored.
        self._crowded = False

    def store_new_pages(self, request: Request, *, least: int = BATCH_PAGES) -> bool:
        """Store the request's computed pages that the kvstore lacks, if at least `least` pages are new since the last
        offer. Under the policy `selective`, only the pages up to the last one that a second request uses are stored.
        Returns False if there is no room (see `_room`) to store all of them now; then as many as fit are stored if
        these are at least `least`, and the rest is offered again later. Does nothing and returns True if fewer pages
        are new, the policy does not store early, or the prompt is too short."""
        first, end = self._offered.get(request.uid, 0), self._cache.ready_pages(request)
        if not self.early or end - first < least or request.prompt_len < self._min_tokens:
            return True
        if self._selective:
            end = self._wanted_twice(request, first, end)
        lacking = self._lacking(request, first, end)
        if not lacking:
            self._offered[request.uid] = end
            return True
        span, room = lacking[-1] + 1 - lacking[0], self._room(_SHARE)
        if span <= room:
            self._offered[request.uid] = end
            self._store_pages(request, lacking[0], lacking[-1] + 1)
        elif room >= least:
            self._offered[request.uid] = lacking[0] + room
            self._store_pages(request, lacking[0], lacking[0] + room)
        return span <= room

    def handle_leave(self, request: Request, *, stores: bool = True) -> None:
        """Handle a request that is giving up its pages. Nothing happens if the policy does not store early or the
        prompt is too short. With `stores`, the pages that were not stored are stored now, as far as there is room.
        Pages that stay unstored for lack of room or without `stores` are counted as dropped; under `selective`, only
        those up to the last one that a second request uses."""
        counts = self.early and request.prompt_len >= self._min_tokens
        if (not self.store_new_pages(request, least=1)) if stores else counts:
            first, end = self._offered.get(request.uid, 0), self._cache.ready_pages(request)
            if self._selective:
                end = self._wanted_twice(request, first, end)
            self._stats.store_dropped(len(self._lacking(request, first, end)))

    def skip(self, request: Request, pages: int) -> None:
        """Note that a run of the request begins, and that its first `pages` pages need not be offered."""
        if pages:
            self._offered[request.uid] = pages
        else:
            self._offered.pop(request.uid, None)

    def forget_request(self, request: Request) -> None:
        """Drop the record of a request that has ended."""
        self._offered.pop(request.uid, None)

    def unstored(self, request: Request) -> int:
        """Return how many of the request's full pages the kvstore has not been given."""
        return len(self._lacking(request, 0, self._cache.ready_pages(request)))

    def may_save(self, request: Request) -> bool:
        """Whether all pages that `save` would store could be stored now; known pages between them count too."""
        lacking = self._lacking(request, 0, self._cache.ready_pages(request))
        return not lacking or (self.enabled and lacking[-1] + 1 - lacking[0] <= self._room(_SWAP_SHARE))

    def save(self, request: Request) -> None:
        """Store the unstored pages of a preempted request, which will load its pages when it resumes."""
        if lacking := self._lacking(request, 0, self._cache.ready_pages(request)):
            self._store_pages(request, lacking[0], lacking[-1] + 1)

    def look_ahead(self, now: float) -> None:
        """Store the pages that will be evicted soon and that the kvstore lacks, as far as there is room; nothing under
        the policies `selective` and `off`. Called before pages are allocated. A group's pages are examined only after
        enough pages were allocated since the last time, or once a store that was in the way has ended."""
        self._now = now
        if not self.enabled or self._selective:
            return
        for group, pool in enumerate(self._pools.pools):
            if pool.allocated - self._looked_at[group] >= self._window // 4:
                self._looked_at[group] = pool.allocated
                for chain in self._chains(group, pool.next_evicted(self._window)):
                    room = self._room(_SHARE)
                    if room < len(chain.hashes):
                        # The tail of a chain is evicted first. The rest is examined again when a store has ended.
                        self._crowded = True
                        chain = chain.tail(room)
                    if chain.hashes:
                        self._store(chain, None, 0)

    def evicted(self, group: int, hashes: Sequence[bytes]) -> None:
        """Count those of the evicted pages, given by their hashes, that the kvstore lacks. Only pages of group 0 count,
        and none that is quarantined. None counts under the policies `selective` and `off`."""
        if self.enabled and not self._selective and not group:
            self._stats.store_missed(sum(map(self._wants_store, hashes)))

    def ended(self, move: Move, moved: MoveEnd, now: float) -> None:
        """Handle the end of a store: the first `moved.pages` pages have arrived, the others may be stored anew; both
        are counted. For the circuit breaker, the store has failed if no page arrived. If all arrived, pages that
        `look_ahead` found no room for are examined again. Quarantined pages stay quarantined: a page arrives also if
        the kvstore had it before, and then the kvstore keeps its old copy."""
        self._now, arrived = now, moved.pages
        if self._crowded and arrived == len(move.hashes):
            # Not after a store of which some pages did not arrive: it would be tried again and again while nothing else
            # happens.
            self._crowded, self._looked_at = False, [-self._window] * self._pools.groups
        if arrived:
            self._breaker.succeeded()
        else:
            self._breaker.failed()
        self._stats.stored(arrived, len(move.hashes) - arrived)
        self.forget(move.hashes[arrived:])

    def remember(self, hashes: Sequence[bytes]) -> None:
        """Note that the kvstore has the pages with these hashes. If too many hashes are remembered, the least recently
        used are dropped."""
        known = self._known
        for digest in hashes:
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._max_known:
            known.popitem(last=False)

    def note_boot_id(self, boot_id: int) -> None:
        """Note the kvstore's boot id; 0 (unknown) is ignored. If it has changed, the kvstore has restarted and may have
        lost pages, so all that is known of its content is forgotten. The quarantine stays, since the kvstore's disk and
        Redis keep pages over a restart."""
        if boot_id and boot_id != self._boot_id:
            if self._boot_id:
                self._known.clear()
            self._boot_id = boot_id

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Note that the kvstore lacks these pages: they may be stored anew."""
        for digest in hashes:
            self._known.pop(digest, None)

    def knows(self, digest: bytes) -> bool:
        """Whether the kvstore has the page with this hash or is being given it, as far as this scheduler knows."""
        return digest in self._known

    def quarantine(self, hashes: Sequence[bytes]) -> None:
        """Quarantine the kvstore's pages with these hashes: they may be damaged, because their sequence ended by an
        error. A request with such a page, unless the device has the page, is not looked up. The pages are not stored
        anew, since the kvstore does not replace a page that it has. Nothing tells this scheduler that the kvstore has
        lost a page. So pages stay quarantined while this object lives and their hashes are among the latest 65,536.
        Does nothing without a kvstore or under the policy `off`."""
        if not self.enabled:
            return
        self.forget(hashes)
        quarantined = self._quarantined
        for digest in hashes:
            quarantined[digest] = None
            quarantined.move_to_end(digest)
        while len(quarantined) > _MOST_QUARANTINED:
            quarantined.popitem(last=False)

    def any_quarantined(self, hashes: Sequence[bytes]) -> bool:
        """Whether the kvstore's copy of any of these pages may be damaged."""
        return bool(self._quarantined) and not self._quarantined.keys().isdisjoint(hashes)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless each count of offered pages belongs to one of these requests, which have not
        ended. What is known of the kvstore's content is not checked."""
        require(self._offered.keys() <= {request.uid for request in requests}, "pages were offered for nobody")

    def _lacking(self, request: Request, first: int, end: int) -> list[int]:
        """Return the indices, from `first` to `end` (exclusive), of the request's pages that the kvstore was not
        given. Quarantined pages are left out."""
        hashes = request.hashes
        return [index for index in range(first, end) if self._wants_store(hashes[index])]

    def _wants_store(self, digest: bytes) -> bool:
        """Whether the page with this hash may be stored: the kvstore was not given it, and it is not quarantined."""
        return digest not in self._known and digest not in self._quarantined

    def _wanted_twice(self, request: Request, first: int, end: int) -> int:
        """Return the index after the last of the request's pages before `end` that a second request has used or uses
        now: a page that was found on the device at the start and that no run of the request computed, or that has two
        references. At least `first`, if no page counts."""
        # A preempted request that resumes may find the pages that it has computed itself.
        local = min(request.local_tokens, request.saved_tokens) // self._pools.page_size
        pool, table = self._pools.pools[0], request.tables[0]
        while end > max(first, local) and pool.references(table[end - 1]) < 2:
            end -= 1
        return end

    def _room(self, share: int) -> int:
        """Return how many more pages may be on their way to the kvstore, if stores may hold one `share`-th of all pages
        (in a small pool 16, or half of it if that is less). Returns 0 if too many stores are in flight or the circuit
        breaker permits no try. While the breaker tries whether stores work again, a single move must hold all pages."""
        moves, pools = self._moves, self._pools
        if moves.stores + pools.groups > self._max_stores or not self._breaker.can_try():
            return 0
        most = max(pools.capacity // share, min(_LEAST_SHARE, pools.capacity // _SWAP_SHARE))
        if not self._breaker.closed:
            most = min(most, _MOVE_PAGES - 1)
        return max(most - moves.storing_pages // pools.groups, 0)

    def _store_pages(self, request: Request, first: int, end: int) -> None:
        """Store the request's pages from `first` to `end` (exclusive), and the page before them. The kvstore tells
        watchers the parent of each page, which it takes from the page before in the same store."""
        # The kvstore learns a page's parent from the page before it in the same put; it does not copy a page again that
        # it has.
        first = max(first - 1, 0)
        tables = tuple(table[first:end] for table in request.tables)
        self._store(_Chain(tables, tuple(request.hashes[first:end])), request, first)

    def _store(self, chain: _Chain, request: Request | None, first: int) -> None:
        """Begin the moves that store the chain, at most 256 new pages each, in every KV group, and note that the
        kvstore has the pages. The circuit breaker begins a try. The chain begins at page `first` of the request, if it
        belongs to one. A move may carry quarantined pages, between or before pages to be stored. The kvstore takes
        those that it lacks, and they stay quarantined."""
        self._breaker.begin_try()
        context = _NO_REQUEST if request is None else request.context
        for start in range(0, len(chain.hashes), _MOVE_PAGES):
            cut = slice(max(start - 1, 0), start + _MOVE_PAGES)
            for group, table in enumerate(chain.tables):
                move = Move(MoveKind.STORE, group, table[cut], chain.hashes[cut], request, first + cut.start)
                self._moves.begin_move(move, context, self._now)
        self.remember(chain.hashes)

    def _chains(self, group: int, pages: Sequence[int]) -> list[_Chain]:
        """Return, as chains, those of the pages that are to be stored, in the order of their eviction (the tail of a
        prefix is evicted first). A chain begins with its parent page if that one, which the kvstore has, comes right
        after it in this order. A chain of which any page is not on the device in every KV group is left out."""
        names = self._names
        chains, before = list[list[bytes]](), b""
        for digest, parent in reversed(names.of(group, pages)):
            if self._wants_store(digest):
                if chains and chains[-1][-1] == parent:
                    chains[-1].append(digest)
                else:
                    # The chain begins with the parent, which watchers are told, if the parent is about to be evicted
                    # too.
                    chains.append([parent, digest] if parent and before == parent else [digest])
            before = digest
        found, groups = list[_Chain](), [names.pages(g) for g in range(self._pools.groups)]
        for hashes in reversed(chains):
            if all(digest in page_of for page_of in groups for digest in hashes):
                found.append(_Chain(tuple([page_of[digest] for digest in hashes] for page_of in groups), tuple(hashes)))
        return found

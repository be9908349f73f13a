"""KvTraffic: the core's lookups in the kvstore, loads from it, and the leases on the pages that were found.

The core does no I/O. KvTraffic collects lookups and releases (`take_effects`), and the service makes these calls. Moves
(copies of pages by the worker) go into the next Grant. Each lease is released exactly once: when its load has been
reported, when its request leaves before it starts, when its answer cannot be used, or when the worker is gone. Every
failure counts as a miss, and a circuit breaker pauses lookups while the kvstore does not answer. Stores to the kvstore
are decided by `Offload`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire_common.circuit_breaker import CircuitBreaker
from quire_common.credit import MoveKind
from quire_common.errors import require
from quire_scheduler.core.request import State
from quire_scheduler.kv.offload import Offload
from quire_scheduler.kv.page_identity import most_hits
from quire_scheduler.kv.page_moves import Move
from quire_scheduler.kv.resume_cost import ResumeCost

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quire_common.credit import PageGeometry
    from quire_common.sequence import RequestContext
    from quire_scheduler.config import SchedulerConfig
    from quire_scheduler.core.request import Request
    from quire_scheduler.core.stats import Stats
    from quire_scheduler.kv.page_moves import MoveEnd, PageMoves
    from quire_scheduler.kv.page_names import PageNames
    from quire_scheduler.kv.page_pools import PagePools
    from quire_scheduler.kv.prefix_cache import PrefixCache


class Lookup(NamedTuple):
    """Asks the kvstore how many of these pages, counted from the first without a gap, it has in every KV group. The
    service answers by `Scheduler.on_lookup`. `compute_s`: how long the worker would take to compute all these pages;
    None until that was measured."""

    uid: int
    context: RequestContext
    hashes: tuple[bytes, ...]
    compute_s: float | None = None


class LookupResult(NamedTuple):
    """The kvstore's answer: the number of pages found in every KV group, the leases (one for each group that has
    pages), the microseconds that it took, the time until which a load may begin, and the slowest medium that holds a
    page. Leases may have been granted although `pages` is 0. `failed`: there was no answer, so the result says nothing
    about the pages."""

    pages: int
    leases: tuple[bytes, ...]
    us: int
    expires_s: float
    medium: str = ""
    failed: bool = False
    boot_id: int = 0
    """The boot id of the kvstore that answered; 0: it did not say."""
    watched: bool = False
    """Whether watchers of the kvstore are told of all pages that its lookups find."""


class Effects(NamedTuple):
    """The calls to the kvstore that the service must make for the core."""

    lookups: Sequence[Lookup]
    releases: Sequence[bytes]


_NO_EFFECTS = Effects((), ())


@dataclass(slots=True)
class _Search:
    """The lookups of one request."""

    # The number of lookups since the last start, and the index of the first page that the last one asked for.
    lookups: int = 0
    first_page: int = 0
    # The kvstore did not answer, so no further lookup is made for the request.
    failed: bool = False
    # A lookup must be made before the next start: the request was swapped, or its pages were not pulled.
    due: bool = False


# The record of a request that was never looked up.
_NO_SEARCH = _Search()
# The most lookups for one start. A request is looked up again if its lease ends or its local pages change while it
# waits.
_MOST_LOOKUPS = 8
# For this long after a request's arrival, the router's knowledge about it is trusted. Later it may be outdated, since
# pages are stored meanwhile, and a request that waits longer loses nothing by a lookup.
_BELIEVED_S = 1.0
# The most pages of one lookup; a kvstore accepts no more in one call.
_MOST_ASKED = 8192


class KvTraffic:
    """The traffic of one core with the kvstore. Without a kvstore (`enabled` is False) nothing is looked up, stored or
    loaded."""

    def __init__(
        self,
        config: SchedulerConfig,
        geometry: PageGeometry,
        pools: PagePools,
        names: PageNames,
        moves: PageMoves,
        cache: PrefixCache,
        stats: Stats,
        *,
        enabled: bool,
    ) -> None:
        self.enabled = enabled
        self.offload = Offload(config, pools, names, moves, cache, stats, enabled=enabled)
        self._moves = moves
        moves.owners[MoveKind.STORE] = self.offload.ended
        moves.owners[MoveKind.LOAD] = self._loaded
        self._cache = cache
        self._min_tokens = config.kvstore_min_tokens
        self._page_size = geometry.page_size
        # The measured cost of bringing pages back.
        self.cost = ResumeCost(geometry.page_size, sum(group.page_bytes for group in geometry.groups))
        self._stats = stats
        self.watched_boot_id = 0
        """The boot id in the kvstore's last answer, if watchers can follow the kvstore; else 0."""
        self._breaker = CircuitBreaker(clock=lambda: self._now, name="kvstore_lookup")
        self._now = 0.0
        # Calls that the service must make.
        self._lookups: list[Lookup] = []
        self._releases: list[bytes] = []
        # Records of requests that have not ended, by uid.
        self._searches: dict[int, _Search] = {}
        # Answers to lookups whose requests have not started.
        self._found: dict[int, LookupResult] = {}

    def tick(self, now: float) -> None:
        """Set the time, and store pages that are about to be evicted. Called before pages are allocated."""
        self._now = now
        self.offload.look_ahead(now)

    def wants_lookup(self, request: Request, local: int) -> bool:
        """Whether to look up, before a start, the request's pages after the `local` ones that the device has. No lookup
        is made without a kvstore, for a short prompt, or for a request that does not read caches. None is made if only
        the page of the last token follows, or after 8 lookups since the last start, or after a failed one. None is made
        while the circuit breaker permits no try, or if the kvstore's copy of any of these pages may be damaged."""
        search = self._search_of(request)
        return (
            self.enabled
            and search.lookups < _MOST_LOOKUPS
            and not search.failed
            and request.sequence.reads_cache
            and request.prompt_len >= self._min_tokens
            and most_hits(request, self._page_size) > local
            and self._breaker.can_try()
            and not self.offload.any_quarantined(request.hashes[local:])
        )

    def is_lookup_needless(self, request: Request, local: int) -> bool:
        """Whether the lookup of a new request would find nothing: its router follows the kvstore, and at most 1 s ago
        knew of no holder of more than the `local` pages. False if this scheduler knows that the kvstore has the next
        page or is being given it, since the router may not know that yet. False also if the request was swapped or its
        pull was incomplete. The caller has checked `wants_lookup`."""
        return (
            request.held_tokens is not None
            and request.held_tokens <= local * self._page_size
            and self._now < request.timing.submitted_s + _BELIEVED_S
            and not self._search_of(request).due
            and not self.offload.knows(request.hashes[local])
        )

    def look_up(self, request: Request, local: int) -> None:
        """Queue a lookup of the request's pages after the first `local`, at most 8192 and without the page
        of its last token, with the time that computing them would take. The circuit breaker begins a try, the lookup
        counts for the limit of 8, and none is due any more. The caller has checked `wants_lookup`."""
        self._breaker.begin_try()
        search = self._searches.setdefault(request.uid, _Search())
        search.lookups, search.first_page, search.due = search.lookups + 1, local, False
        hashes = self._asked(request)
        compute_s = self.cost.compute_s(len(hashes))
        self._lookups.append(Lookup(request.uid, request.context, hashes, compute_s))

    def take_answer(self, request: Request | None, result: LookupResult) -> None:
        """Take the kvstore's answer to a lookup, or its failure. A failure is noted for the circuit breaker and
        counted; an answer for the breaker, the measured time of lookups and `watched_boot_id`. Unless the request has
        left, either is added to its timing and the counts of tokens; an answer updates what is known of the kvstore's
        content, and after a failure the request is not looked up again. Found pages stay pinned until the request loads
        them, leaves or abandons them. The leases are released at once if the request has left or nothing was found."""
        if result.failed:
            self._breaker.failed()
            self._stats.lookup_failed()
        else:
            self._breaker.succeeded()
            self.watched_boot_id = result.boot_id if result.watched else 0
            self.cost.looked_up(result.us)
        if request is None or not result.pages:
            self._releases += result.leases
        else:
            self._found[request.uid] = result
        if request is not None:
            request.timing.looked_up(result.us)
            self._searches[request.uid].failed |= result.failed
            asked = self._asked(request)
            self._stats.looked_up(len(asked) * self._page_size, result.pages * self._page_size)
            if not result.failed:
                self.offload.note_boot_id(result.boot_id)
                self.offload.remember(asked[: result.pages])
                self.offload.forget(asked[result.pages :])

    def must_ask(self, request: Request, local: int) -> bool:
        """Whether a READY request must be looked up in the kvstore before it starts. This is so after a swap or an
        incomplete pull, or if the last answer reached beyond the `local` pages and cannot be used any more, as long as
        a lookup is wanted. An answer is dropped and its leases are released if they end too soon, if its pages no
        longer follow the `local` ones on the device, or if one of its pages has been quarantined since."""
        found, search = self._found.get(request.uid), self._search_of(request)
        if found is None:
            return search.due and self.wants_lookup(request, local)
        end = search.first_page + found.pages
        suspect = self.offload.any_quarantined(request.hashes[search.first_page : end])
        if self._now < found.expires_s and local == search.first_page and not suspect:
            return False
        self._abandon(request)
        return local < end and self.wants_lookup(request, local)

    def search_again(self, request: Request) -> None:
        """Note that a lookup of the request is due before it starts (see `must_ask`)."""
        self._searches.setdefault(request.uid, _Search()).due = True

    def forget(self, request: Request) -> None:
        """Drop the records of a request that has ended, and release the leases on pages that were found for it."""
        self._abandon(request)
        self._searches.pop(request.uid, None)
        self.offload.forget_request(request)

    def load_pages(self, request: Request, local: int) -> int:
        """Begin to load the pages after the first `local` that the kvstore was found to have. Called when the request
        takes its slot: the counts of its lookups and of the pages that it has offered to the kvstore begin anew.
        Returns how many leading pages the request need not compute."""
        if search := self._searches.get(request.uid):
            search.lookups, search.due = 0, False
        self.offload.skip(request, 0)
        found = self._found.pop(request.uid, None)
        if found is None:
            return local
        end = local + found.pages
        hashes = tuple(request.hashes[local:end])
        for group, lease in enumerate(found.leases):
            pages = request.tables[group][local:end]
            move = Move(MoveKind.LOAD, group, pages, hashes, request, local, lease, found.medium)
            self._moves.begin_move(move, request.context, self._now)
        return end

    def swap_pages(self, request: Request) -> bool:
        """Decide whether to load a preempted request's pages when it resumes, rather than compute them: only if it has
        full computed pages, a lookup is wanted, the unstored pages have room, and storing and loading is measured to be
        quicker. If so, store the pages that the kvstore lacks, note that a lookup is due before the next start (see
        `must_ask`), and return True; else return False."""
        pages = min(self._cache.ready_pages(request), most_hits(request, self._page_size))
        if not pages or not self.wants_lookup(request, 0):
            return False
        unstored = self.offload.unstored(request)
        if not self.offload.may_save(request) or not self.cost.swap_pays(pages, unstored):
            return False
        self.search_again(request)
        self.offload.save(request)
        return True

    def handle_worker_loss(self) -> None:
        """Forget all moves and answers, since the worker is gone: it reports no move, and no request starts. Their
        leases are released, and pages that were being loaded are no longer expected."""
        for found in self._found.values():
            self._releases += found.leases
        self._found.clear()
        for move in self._moves.pop_lost_moves():
            if move.lease:
                self._releases.append(move.lease)
            if move.kind is MoveKind.LOAD and move.request is not None:
                self._cache.loaded(move.request, move.group, move.first, move.pages, arrived=0)

    def take_effects(self) -> Effects:
        """Return the collected calls to the kvstore, and clear them."""
        if not self._lookups and not self._releases:
            return _NO_EFFECTS
        effects = Effects(self._lookups, self._releases)
        self._lookups, self._releases = [], []
        return effects

    @property
    def idle(self) -> bool:
        """Whether no answer of the kvstore waits for its request to start. Leases of loads in flight do not count."""
        return not self._found

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless each answer belongs to a READY request, each record to a request that has not
        ended, and each lease is held once, by an answer or a move, and not about to be released. Calls
        `Offload.check_integrity` too."""
        requests = list(requests)
        ready = {request.uid for request in requests if request.state is State.READY}
        require(self._searches.keys() <= {request.uid for request in requests}, "the kvstore was asked for nobody")
        self.offload.check_integrity(requests)
        require(self._found.keys() <= ready, "a lease is held for nobody")
        leases = [lease for found in self._found.values() for lease in found.leases]
        leases += [move.lease for move in self._moves.all() if move.lease]
        require(len(leases) == len(set(leases)), "a lease is held twice")
        require(not set(leases) & set(self._releases), "a lease is held and released")

    def _asked(self, request: Request) -> tuple[bytes, ...]:
        """Return the hashes of the pages that the request's last lookup asked for, at most 8192. The page of the last
        token is not among them."""
        first = self._search_of(request).first_page
        most = min(most_hits(request, self._page_size), first + _MOST_ASKED)
        return tuple(request.hashes[first:most])

    def _search_of(self, request: Request) -> _Search:
        """Return the request's record. The caller must not change it."""
        return self._searches.get(request.uid, _NO_SEARCH)

    def _abandon(self, request: Request) -> None:
        """Release the leases on pages that were found for the request; it will not load them."""
        if found := self._found.pop(request.uid, None):
            self._releases += found.leases

    def _loaded(self, move: Move, moved: MoveEnd, now: float) -> None:
        """Handle the end of a load. Release its lease, name the pages that arrived, and note that the kvstore lacks the
        others. The loaded tokens are counted by the pages of KV group 0. If the request still holds these pages, the
        load is added to its timing; the missing pages no longer count as cached, and it computes them."""
        request, end, arrived = move.request, move.first + len(move.pages), moved.pages
        self._releases.append(move.lease)
        self.offload.forget(move.hashes[arrived:])
        if request is None:
            return
        if not move.group:
            self._stats.loaded(move.medium, arrived * self._page_size)
        self._cache.loaded(request, move.group, move.first, move.pages, arrived)
        # The request may have lost its pages since, or run again on other pages.
        if request.tables and request.tables[move.group][move.first : end] == move.pages:
            request.lost_pages((move.first + arrived) * self._page_size)
            request.timing.loaded(moved.us, arrived)

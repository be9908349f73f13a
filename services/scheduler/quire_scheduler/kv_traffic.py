"""Pages to and from the kvstore: what to look up, load and store, which leases are held, which moves are in flight.

Pure: lookups and releases are left in `effects` for the service to carry out, moves go into the next Grant. A lease is
released exactly once: when its load was reported, when its request leaves before starting, or when the worker is gone.
Pages of a move stay referenced until the worker reports it, whatever happens to the request. Every failure is a miss.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.credit import MoveKind, PageMove
from quire_scheduler.page_identity import most_hits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.sequence import RequestContext
    from quire_scheduler.config import SchedulerConfig
    from quire_scheduler.page_pools import PagePools
    from quire_scheduler.prefix_cache import PrefixCache
    from quire_scheduler.request import Request
    from quire_scheduler.stats import Stats


class Lookup(NamedTuple):
    """Ask the kvstore how many of these pages it has in a row, in every group; answer with `Scheduler.on_lookup`."""

    uid: int
    context: RequestContext
    hashes: tuple[bytes, ...]


class LookupResult(NamedTuple):
    """Pages found in every group, one lease per group (none where nothing was found), and when the leases end."""

    pages: int
    leases: tuple[bytes, ...]
    us: int
    expires_s: float


@dataclass(slots=True)
class Effects:
    """What the service must do outside the core."""

    lookups: list[Lookup] = field(default_factory=list)
    releases: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.lookups or self.releases)


# Times that one request is looked up: again where its lease ends, or its local pages change, while it waits.
_MOST_LOOKUPS = 8


class _Move(NamedTuple):
    kind: MoveKind
    request: Request
    group: int
    first: int
    pages: list[int]
    hashes: tuple[bytes, ...]
    lease: bytes


class KvTraffic:
    """One core's traffic with the kvstore; without one (`enabled` False) it does nothing."""

    def __init__(
        self, config: SchedulerConfig, pools: PagePools, cache: PrefixCache, stats: Stats, *, enabled: bool
    ) -> None:
        self.enabled = enabled
        self._cache = cache
        self._min_tokens = config.kvstore_min_tokens
        self._max_stores = config.kvstore_moves
        self._max_known = config.kvstore_known_pages
        self._pools = pools
        self._stats = stats
        self._effects = Effects()
        # Answers to lookups whose requests have not started.
        self._found: dict[int, LookupResult] = {}
        self._moves: dict[int, _Move] = {}
        self._next_move = 1
        self._stores = 0
        # Hashes that the kvstore has, or is being given; least recently used first.
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._outgoing: list[PageMove] = []

    def wants_lookup(self, request: Request, local: int) -> bool:
        """Whether to ask before starting for what follows the `local` pages that the device has: not for the page of
        the last token, and not for ever."""
        return (
            self.enabled
            and request.lookups < _MOST_LOOKUPS
            and not request.sequence.skip_cache_read
            and request.prompt_len >= self._min_tokens
            and most_hits(request, self._pools.page_size) > local
        )

    def ask(self, request: Request, local: int) -> None:
        """Look up what follows the local pages."""
        request.lookups += 1
        request.lookup_from = local
        self._effects.lookups.append(Lookup(request.uid, request.context, self._asked(request)))

    def answered(self, request: Request | None, result: LookupResult) -> None:
        """The kvstore answered; the request may have left meanwhile."""
        if request is None or not result.pages:
            self._effects.releases += result.leases
        else:
            self._found[request.uid] = result
        if request is not None:
            request.timing.looked_up(result.us)
            asked = self._asked(request)
            self._stats.cache_queries += len(asked) * self._pools.page_size
            self._stats.cache_hits += result.pages * self._pools.page_size
            for digest in asked[: result.pages]:
                self._remember(digest)
            for digest in asked[result.pages :]:
                # It was dropped there: it may be stored anew.
                self._known.pop(digest, None)

    def must_ask_again(self, request: Request, local: int, now: float) -> bool:
        """Abandon what was found where the lease would end before its pages are read, or where they no longer follow
        the local ones; whether the kvstore should be asked anew before the request starts."""
        found = self._found.get(request.uid)
        if found is None or (now < found.expires_s and local == request.lookup_from):
            return False
        self.abandon(request)
        return local < request.lookup_from + found.pages and self.wants_lookup(request, local)

    def abandon(self, request: Request) -> None:
        """The request will not load what was found for it."""
        if found := self._found.pop(request.uid, None):
            self._effects.releases += found.leases

    def load(self, request: Request, local: int) -> int:
        """The request takes its slot and pages: fill those that follow the local ones from the kvstore. Returns how
        many pages it need not compute."""
        found = self._found.pop(request.uid, None)
        if found is None:
            return local
        end = local + found.pages
        hashes = tuple(request.hashes[local:end])
        for group, lease in enumerate(found.leases):
            pages = request.tables[group][local:end]
            self._move(_Move(MoveKind.LOAD, request, group, local, pages, hashes, lease))
        return end

    def store(self, request: Request) -> None:
        """The prompt is computed: give the kvstore the full pages that it lacks; what is too much is dropped."""
        if not self.enabled or request.prompt_len < self._min_tokens:
            return
        lacking = [i for i, digest in enumerate(request.hashes) if digest not in self._known]
        if not lacking or self._stores >= self._max_stores:
            return
        # Without gaps, for a page's parent is the one before it; what the kvstore has of it, it does not want.
        first, end = lacking[0], lacking[-1] + 1
        hashes = tuple(request.hashes[first:end])
        for group, table in enumerate(request.tables):
            self._stores += 1
            self._move(_Move(MoveKind.STORE, request, group, first, table[first:end], hashes, b""))
        for digest in hashes:
            self._remember(digest)

    def take_moves(self) -> list[PageMove]:
        """Moves for the next Grant."""
        moves, self._outgoing = self._outgoing, []
        return moves

    @property
    def has_moves(self) -> bool:
        """Whether a Grant has moves to carry."""
        return bool(self._outgoing)

    def moved(self, move_id: int, failed: bool, pages: int, us: int) -> None:
        """The worker reported a move; an unknown one is of no concern."""
        move = self._moves.pop(move_id, None)
        if move is None:
            return
        if move.kind is MoveKind.LOAD:
            self._loaded(move, min(pages, len(move.pages)) if failed else len(move.pages), us)
        else:
            self._stores -= 1
            if failed:
                for digest in move.hashes:
                    self._known.pop(digest, None)
        self._pools.release(move.group, move.pages)

    def lost(self) -> None:
        """The worker is gone: no move will be reported, no request will start."""
        for found in self._found.values():
            self._effects.releases += found.leases
        self._effects.releases += [move.lease for move in self._moves.values() if move.lease]
        for move in self._moves.values():
            self._pools.release(move.group, move.pages)
        self._found.clear()
        self._moves.clear()
        self._outgoing.clear()
        self._stores = 0

    def take_effects(self) -> Effects:
        """What to do outside, once."""
        effects, self._effects = self._effects, Effects()
        return effects

    def referenced(self) -> list[tuple[int, Sequence[int]]]:
        """Pages that moves hold, by group."""
        return [(move.group, move.pages) for move in self._moves.values()]

    @property
    def idle(self) -> bool:
        """No move in flight, no lease held."""
        return not self._moves and not self._found

    def _asked(self, request: Request) -> tuple[bytes, ...]:
        """What was asked for last."""
        return tuple(request.hashes[request.lookup_from : most_hits(request, self._pools.page_size)])

    def _loaded(self, move: _Move, arrived: int, us: int) -> None:
        request, end = move.request, move.first + len(move.pages)
        self._effects.releases.append(move.lease)
        self._cache.loaded(request, move.group, move.first, move.pages, arrived)
        # It may have left since, or run again on other pages.
        if request.tables and request.tables[move.group][move.first : end] == move.pages:
            request.lost_pages((move.first + arrived) * self._pools.page_size)
            request.timing.loaded(us, arrived)

    def _move(self, move: _Move) -> None:
        move_id, self._next_move = self._next_move, self._next_move + 1
        self._moves[move_id] = move
        self._pools.retain(move.group, move.pages)
        self._outgoing.append(
            PageMove(
                move_id,
                move.kind,
                move.group,
                np.array(move.pages, np.int32),
                move.hashes,
                move.lease,
                context=move.request.context,
            )
        )

    def _remember(self, digest: bytes) -> None:
        if not self._max_known:
            return
        self._known[digest] = None
        self._known.move_to_end(digest)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)

"""Pulls: requests whose pages are pulled from another engine, which has prefilled them.

A ticket names the pages and the workers that serve them. A request with a ticket takes device pages before it has a
slot, and moves (copies that the worker carries out) fill them. Then the request either starts on these pages or gives
them back. When all moves of a pull have ended, the full pages that arrived are named, so that other requests find them.
The session of each request is told once how the pull went, unless the request ends before. A failed pull does not fail
its request: missing pages are looked up in the kvstore, if there is one, or computed.

This module does not decide which request is next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_common.credit import MoveKind
from quire_common.errors import FailedPrecondition, InvalidArgument, QuireError, Unavailable, require
from quire_common.sequence import page_extras
from quire_common.ticket import Ticket, check_compatible, tail_handle
from quire_scheduler.core.outputs import PulledNote
from quire_scheduler.core.request import State
from quire_scheduler.kv.page_allocator import NO_FENCE
from quire_scheduler.kv.page_identity import identify
from quire_scheduler.kv.page_moves import Move
from quire_scheduler.kv.resume_cost import Lane

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_common.credit import PageGeometry
    from quire_scheduler.core.outputs import OutputBuffer
    from quire_scheduler.core.pending_queue import PendingQueue
    from quire_scheduler.core.request import Request
    from quire_scheduler.core.stats import Stats
    from quire_scheduler.disaggregation.handover_records import HandoverRecords
    from quire_scheduler.kv.kv_traffic import KvTraffic
    from quire_scheduler.kv.page_moves import Carried, MoveEnd, PageMoves
    from quire_scheduler.kv.page_pools import PagePools
    from quire_scheduler.kv.prefix_cache import Hit, PrefixCache

# Requests without a slot may hold 1/_SHARE of all pages. A single request may always hold its pages.
_SHARE = 4


@dataclass(slots=True)
class Pull:
    """The pages that a request gets by its ticket: those from index `first` on. The pages before `first` were on the
    device already. `arrived` of them are on the device, from the first on, when all moves have ended; `us` is the time
    of the longest move, in microseconds. `flying` has the ids of the moves that go on. `told`: the session was told how
    the pull went."""

    ticket: Ticket
    first: int = 0
    arrived: int = 0
    us: int = 0
    flying: set[int] = field(default_factory=set)
    told: bool = False

    @property
    def wanted(self) -> int:
        """Pages to be pulled."""
        return max(self.ticket.pages - self.first, 0)

    def tokens(self) -> int:
        """Return the number of positions whose KV is on the device when all moves have ended."""
        if self.wanted and self.arrived == self.wanted:
            return self.ticket.tokens()
        return (self.first + self.arrived) * self.ticket.geometry.page_size


class Pulls:
    """All pulls of one core. `host` names this worker's host, and `elsewhere` says whether missing pages may be found
    in a kvstore."""

    def __init__(
        self,
        geometry: PageGeometry,
        pools: PagePools,
        moves: PageMoves,
        cache: PrefixCache,
        kv: KvTraffic,
        waiting: PendingQueue,
        outputs: OutputBuffer,
        handovers: HandoverRecords,
        stats: Stats,
        *,
        host: bytes,
        elsewhere: bool,
    ) -> None:
        self._geometry = geometry
        self._pools = pools
        self._moves = moves
        self._cache = cache
        self._kv = kv
        self._waiting = waiting
        self._outputs = outputs
        self._handovers = handovers
        self._stats = stats
        # Whether missing pages may be found in a kvstore.
        self._elsewhere = elsewhere
        self._host = host
        # The speeds of pulls from other hosts, and of pulls from this host.
        self._lanes = Lane(), Lane()
        # Pulls by the uid of their request, from the acceptance of its ticket until the request starts or the pull
        # ends.
        self._pulls: dict[int, Pull] = {}
        # `_holding`: requests that hold pages without a slot, by uid. `_dropped`: how many pages each cancelled move
        # still writes, by move id; nobody wants these pages any more.
        self._holding: dict[int, Request] = {}
        self._dropped: dict[int, int] = {}
        # Uids of the requests that have started on pulled pages.
        self._delivered: set[int] = set()
        moves.owners[MoveKind.PULL] = self._pulled

    @property
    def returning(self) -> int:
        """Pages per KV group that become free when the cancelled moves are reported."""
        return sum(self._dropped.values()) // self._pools.groups

    @property
    def bytes_per_s(self) -> float:
        """Speed of recent pulls from other hosts; 0.0 before the first."""
        return self._lanes[False].rate.per_s()

    @property
    def near_bytes_per_s(self) -> float:
        """Speed of recent pulls from this host; 0.0 before the first."""
        return self._lanes[True].rate.per_s()

    def measured(self, carried: Carried, now: float) -> None:
        """If these ended moves are pulls, update the measured speed (of the same host or of others) and count their
        bytes; other kinds are ignored."""
        if carried.kind is MoveKind.PULL:
            self._lanes[carried.near].add_ended_batch(carried.amount, carried.longest_us, now)
            self._stats.pulled(carried.amount)

    def ticket_refusal(self, request: Request, ticket: Ticket) -> QuireError | None:
        """Return the error that says why the request cannot use the ticket's pages (another layout, no source, other
        tokens), or None if it can. To compare tokens, the request's page hashes are extended to all of its full
        pages."""
        try:
            check_compatible(ticket.geometry, self._geometry)
        except FailedPrecondition as error:
            return error
        if not ticket.sources:
            return Unavailable(
                "NO_SOURCE", "The ticket names no worker that serves pages.", "Compute, or prefill again."
            )
        size, whole = self._geometry.page_size, len(ticket.page_hashes)
        identify(request, size)
        first, end = whole * size, ticket.tokens()
        same = end <= request.known_len and tuple(request.hashes[:whole]) == ticket.page_hashes
        if same and ticket.tail_tokens:
            parent = request.hashes[whole - 1] if whole else b""
            tail = tail_handle(request.ids(first, end), page_extras(request.sequence), parent, first)
            same = tail == ticket.tail_handle
        if same:
            return None
        return InvalidArgument(
            "TICKET_OF_OTHERS", "The ticket's pages hold other tokens than the request's.", "Hand over its own ticket."
        )

    def accept_ticket(self, request: Request, ticket: Ticket) -> None:
        """Record the ticket; the request may pull its pages when it is the request's turn."""
        self._pulls[request.uid] = Pull(ticket)

    def pulling(self) -> set[int]:
        """Return the uids of the requests that have a pull: they wait for pages that another engine has, or hold such
        pages without a slot."""
        return set(self._pulls)

    def has_pull(self, request: Request) -> bool:
        """Whether the request has a pull: it waits for pages that another engine has, or holds such pages without a
        slot."""
        return request.uid in self._pulls

    def ticket_refused(self, request: Request, error: QuireError | None) -> None:
        """Tell the session that nothing is pulled for the request. `error` says why its ticket cannot be used, or why
        none comes."""
        self._outputs.pulled(request.session, PulledNote(request.handle, 0, 0, 0, error))

    def has_share(self, pages: int) -> bool:
        """Whether requests without a slot may hold `pages` more pages: together at most a quarter of all pages, but a
        single request may always hold its own."""
        held = sum(len(request.tables[0]) for request in self._holding.values())
        return not held or held + pages <= self._pools.capacity // _SHARE

    def pages_needed(self, request: Request) -> int:
        """Return the number of pages that the request takes before it starts: enough for its known tokens, and for the
        token that it still awaits from the prefill engine."""
        return self._pools.pages_for(request.known_len + self._handovers.lacks_token(request))

    def take_pages(self, request: Request, hit: Hit, now: float) -> None:
        """Give the queue's head its pages and begin to pull; the head is PULLING from now on. The request shares the
        pages of `hit`, all of which must hold their content. The other pages are newly allocated, and one move per KV
        group fills those that the ticket covers. If no page is to be pulled, the pull is over at once. The caller has
        checked that enough pages are free."""
        pull = self._pulls[request.uid]
        self._waiting.hold(request)
        self._holding[request.uid] = request
        self._pools.share(request, hit.tables)
        self._pools.give(request, self.pages_needed(request) - hit.pages)
        pull.first = hit.pages
        self._cache.restart(request, pull.first)
        pull.arrived = pull.wanted
        names, ticket = pull.ticket.handles[pull.first :], pull.ticket
        near = self._is_near(ticket)
        for group, table in enumerate(request.tables):
            if names:
                pages = table[pull.first : ticket.pages]
                move = Move(MoveKind.PULL, group, pages, names, request, pull.first, ticket=ticket, near=near)
                pull.flying.add(self._moves.begin_move(move, request.context, now))
        self.settle_pull(request)

    def settle_pull(self, request: Request) -> None:
        """Let a request with a pull go on, after one of its moves has ended or the prefill engine's token has come.
        While other moves go on, nothing happens. Then the full pages that arrived are named, and the session is told
        how the pull went, unless it was told before. If the request still lacks the token that the prefill engine
        samples, it goes on waiting. Otherwise it waits for a slot. But if pages are missing and a kvstore may have
        them, the request releases all its pages and its pull ends. A lookup is then due before its start, which is made
        if it is wanted at that time (see `KvTraffic.must_ask`)."""
        pull = self._pulls[request.uid]
        if pull.flying:
            return
        # The request still writes the page of its last known token, until another token follows.
        self._cache.computed(request, min(pull.tokens(), request.known_len - 1))
        if not pull.told:
            self._notify_session(request, pull)
        if self._handovers.lacks_token(request):
            return
        if self._elsewhere and pull.arrived < pull.wanted:
            # The pages that arrived are found again by their names.
            self._let_go(request, pull)
            self._waiting.set_aside(request)
            del self._pulls[request.uid]
            self._kv.search_again(request)
            self._waiting.recall(request)
        else:
            self._waiting.make_ready(request)

    def give_up(self, request: Request) -> None:
        """Have nothing more pulled for a waiting request, if it has a pull. If the request holds pages, only the moves
        that go on are cancelled; the request keeps its pages and its pull, which is settled when the worker reports
        their end. Otherwise drop its ticket, and tell its session unless it was told before."""
        pull = self._pulls.get(request.uid)
        if pull is None:
            return
        if request.state in (State.PULLING, State.PULLED):
            self._moves.cancel_moves(pull.flying)
            return
        self._forget(request, pull)

    def hand_over(self, request: Request) -> tuple[int, int]:
        """End the pull of a request that now starts on the pulled pages. The request stays known to `was_delivered`
        until `forget`. Returns two numbers: its pages that were on the device before the pull, and its positions that
        have their KV on the device now, without the last token."""
        pull = self._pulls.pop(request.uid)
        del self._holding[request.uid]
        self._delivered.add(request.uid)
        return pull.first, min(pull.tokens(), request.known_len - 1)

    def newest_holder(self, sparing: Request | None = None) -> Request | None:
        """Return the request with the largest order key among those that hold pages, other than `sparing`; None if
        there is none."""
        held = [request for request in self._holding.values() if request is not sparing]
        return max(held, key=lambda request: request.order_key, default=None)

    def reclaim_pages(self, request: Request) -> int:
        """Take back the pages of a request that holds some without a slot, and set the request aside. The request pulls
        again later, unless its session was told already how the pull went. In that case its pull ends, and the request
        is READY again at once if it lacks no token. Returns the number of pages per KV group that become free, now or
        when cancelled moves are reported."""
        pull = self._pulls[request.uid]
        freed = self._pools.freed_by(request) + (len(pull.flying) > 0) * pull.wanted
        self._let_go(request, pull)
        self._waiting.set_aside(request)
        if pull.told:
            del self._pulls[request.uid]
            if not self._handovers.lacks_token(request):
                self._waiting.recall(request)
        return freed

    def abandon_pull(self, request: Request) -> None:
        """End the pull of a request that leaves the replica, and drop the pages that it holds."""
        pull = self._pulls.pop(request.uid, None)
        if pull is not None and request.uid in self._holding:
            self._let_go(request, pull)

    def was_delivered(self, request: Request) -> bool:
        """Whether the request has started on pulled pages, rather than on loaded ones."""
        return request.uid in self._delivered

    def forget(self, request: Request) -> None:
        """Drop the records of a request that has ended."""
        self._delivered.discard(request.uid)

    def handle_worker_loss(self) -> None:
        """Forget the cancelled moves: the worker is gone and reports none."""
        self._dropped.clear()

    def recall_set_aside(self) -> None:
        """Return requests that were set aside and still have a pull to READY, if they may hold pages (see `has_share`)
        and their cancelled moves, if any, have been reported. A request was set aside because requests without a slot
        held too many pages, or because its own pages were taken back (see `reclaim_pages`)."""
        for request in self._waiting.requests_set_aside():
            pull = self._pulls.get(request.uid)
            if pull is None or not self.has_share(self.pages_needed(request)):
                continue
            if not any(move in self._dropped for move in pull.flying):
                pull.flying.clear()
                self._waiting.recall(request)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless each request that holds pages without a slot is PULLING while it waits for moves
        or a token, else PULLED, and its session was told of the pull exactly if the moves have ended. Each pull, and
        each record of `was_delivered`, must be of a request that lives, and no pull of one that has started. The pull
        moves in flight must be exactly those that such requests await or that were cancelled."""
        living = {request.uid: request for request in requests}
        holding = {uid: r for uid, r in living.items() if r.state in (State.PULLING, State.PULLED)}
        require(holding == self._holding, "pages are held for nobody")
        require(self._pulls.keys() | self._delivered <= living.keys(), "a request that has left still has a pull")
        require(all(living[uid].state is not State.STARTED for uid in self._pulls), "a running request has a pull")
        flying = {move_id for move_id, move in self._moves.items() if move.kind is MoveKind.PULL}
        awaited = {move_id for request in holding.values() for move_id in self._pulls[request.uid].flying}
        require(flying == awaited | self._dropped.keys(), "a pull is waited for by nobody, or was not begun")
        for request in holding.values():
            pull = self._pulls[request.uid]
            waits = bool(pull.flying or self._handovers.lacks_token(request))
            require(waits == (request.state is State.PULLING), "a request waits for nothing")
            require(pull.told == (not pull.flying), "a pull is over and nobody was told")

    def _pulled(self, move: Move, moved: MoveEnd, now: float) -> None:
        """Handle the end of a pull's move: record how many pages arrived (the fewest of all KV groups count), and let
        the request go on. If the request no longer waits for the move, only its record is dropped."""
        self._dropped.pop(moved.id, None)
        request = move.request
        pull = None if request is None else self._pulls.get(request.uid)
        if request is None or pull is None or moved.id not in pull.flying or request.uid not in self._holding:
            return
        pull.flying.discard(moved.id)
        pull.arrived, pull.us = min(pull.arrived, moved.pages), max(pull.us, moved.us)
        self.settle_pull(request)

    def _let_go(self, request: Request, pull: Pull) -> None:
        """Cancel the request's moves and drop its pages. Pages that these moves still write become free when the moves
        are reported."""
        self._dropped |= dict.fromkeys(pull.flying, pull.wanted)
        self._moves.cancel_moves(pull.flying)
        self._pools.take_back(request, NO_FENCE)
        self._cache.restart(request, 0)
        del self._holding[request.uid]

    def _forget(self, request: Request, pull: Pull) -> None:
        """Drop a ticket by which nothing was pulled, and tell the session unless it was told before."""
        del self._pulls[request.uid]
        if not pull.told:
            self._outputs.pulled(request.session, PulledNote(request.handle, 0, 0, 0, _given_up()))

    def _notify_session(self, request: Request, pull: Pull) -> None:
        """Tell the session how many of the wanted pages the request got and, if some are missing, why. Add the pull to
        the request's timing."""
        pull.told = True
        error = None if pull.arrived == pull.wanted else _partial_pull_error(pull)
        near = self._is_near(pull.ticket)
        note = PulledNote(request.handle, pull.arrived, pull.wanted, pull.us, error, near)
        self._outputs.pulled(request.session, note)
        request.timing.pulled(pull.us, pull.arrived)

    def _is_near(self, ticket: Ticket) -> bool:
        return bool(self._host) and ticket.host == self._host


def _partial_pull_error(pull: Pull) -> Unavailable:
    """Return the error of a pull that did not bring all pages."""
    return Unavailable(
        "PULL_INCOMPLETE",
        f"{pull.arrived} of {pull.wanted} pages came.",
        "See the logs of both workers; what did not come is computed.",
    )


def _given_up() -> Unavailable:
    return Unavailable("PULL_GIVEN_UP", "Its router gave up the pull before it began.", "Nothing needs to be done.")

"""PageMoves: moves in flight. A move is a copy of pages to or from the device that the worker carries out. A Grant
orders the move, and a Report tells of its end.

A move has its own references to the pages that it writes, whatever happens to its request. Pages that it reads are lent
to it. For each kind of move, `owners` has a function that is called when such a move ends. This module does not know
why pages are moved or when leases end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.credit import MoveKind, PageMove
from quire_common.errors import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from quire_common.sequence import RequestContext
    from quire_common.ticket import Ticket
    from quire_scheduler.core.request import Request
    from quire_scheduler.kv.page_pools import PagePools


_LATE_S = 0.25
_WRITES = (MoveKind.LOAD, MoveKind.PULL)


class Move(NamedTuple):
    """A move of pages of one KV group that follow each other in a sequence; the first one is page `first` of the
    request. A store may have no request, and an export has none."""

    kind: MoveKind
    group: int
    pages: list[int]
    hashes: tuple[bytes, ...]
    request: Request | None = None
    first: int = 0
    lease: bytes = b""
    medium: str = ""
    # The ticket of an export or a pull.
    ticket: Ticket | None = None
    # Whether a pull reads from a worker on the same host.
    near: bool = False


class MoveEnd(NamedTuple):
    """The worker's report of a move's end. If the move failed, only its first `pages` pages arrived."""

    id: int
    failed: bool
    pages: int
    us: int


class Carried(NamedTuple):
    """The total of the moves of one kind in one Report: their bytes, and the time of the longest. `near`: pulls from
    the same host, which use another transport and are measured separately."""

    kind: MoveKind
    amount: int
    longest_us: int
    near: bool = False


class PageMoves:
    """All moves of one core. `page_bytes` is the size of a page by KV group."""

    def __init__(self, pools: PagePools, page_bytes: Sequence[int]) -> None:
        self.storing_pages = 0
        # By kind, a function that is called when a move has ended, before its pages are released: with the move, its
        # end (including the number of pages that arrived) and the time.
        self.owners: dict[MoveKind, Callable[[Move, MoveEnd, float], object]] = {}
        # The time when each store began, by move id; the oldest comes first.
        self._began_s: dict[int, float] = {}
        self._pools = pools
        self._page_bytes = page_bytes
        self._moves: dict[int, Move] = {}
        self._next = 1
        self._outgoing: list[PageMove] = []
        self._cancelled: list[int] = []

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def outgoing(self) -> bool:
        """Whether the next Grant has moves, or cancellations of moves, to carry."""
        return bool(self._outgoing or self._cancelled)

    @property
    def stores(self) -> int:
        """The number of moves in flight that are stores to the kvstore."""
        return len(self._began_s)

    def are_late(self, now: float) -> bool:
        """Whether the oldest store has taken so long that nobody should wait for its pages."""
        return bool(self._began_s) and now - next(iter(self._began_s.values())) > _LATE_S

    def begin_move(self, move: Move, context: RequestContext, now: float) -> int:
        """Queue the move for the next Grant. Until it ends, its pages cannot be freed: pages that it writes get a
        reference, pages that it reads are lent. Returns the new move's id."""
        move_id, self._next = self._next, self._next + 1
        if move.kind in _WRITES:
            self._pools.retain(move.group, move.pages)
        else:
            self._pools.lend(move.group, move.pages)
        if move.kind is MoveKind.STORE:
            self._began_s[move_id] = now
            self.storing_pages += len(move.pages)
        self._moves[move_id] = move
        self._outgoing.append(_to_carry(move_id, move, context))
        return move_id

    def take_moves(self) -> list[PageMove]:
        """Return the moves for the next Grant, and clear them."""
        moves, self._outgoing = self._outgoing, []
        return moves

    def cancel_moves(self, move_ids: Iterable[int]) -> None:
        """Have the next Grant cancel these moves. The worker still reports the end of each."""
        self._cancelled += [move_id for move_id in move_ids if move_id in self._moves]

    def take_cancelled(self) -> list[int]:
        """Return the ids of the moves that the next Grant must cancel, and clear them. The worker ignores moves that
        have ended meanwhile."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def ended(self, ends: Iterable[MoveEnd], now: float) -> list[Carried]:
        """Settle the moves whose end the worker has reported: call their owners, then release their pages. Unknown ids
        are ignored. All pages of a move have arrived unless it failed; then its first `pages` have. Returns the bytes
        that arrived and the longest time, for each kind of move; pulls from the same host and from others count as two
        kinds."""
        carried = dict[tuple[MoveKind, bool], Carried]()
        for end in ends:
            move = self._moves.pop(end.id, None)
            if move is None:
                continue
            arrived = min(end.pages, len(move.pages)) if end.failed else len(move.pages)
            self.owners[move.kind](move, end._replace(pages=arrived), now)
            self._release(end.id, move)
            one = carried.get((move.kind, move.near), Carried(move.kind, 0, 0, move.near))
            amount = one.amount + arrived * self._page_bytes[move.group]
            carried[move.kind, move.near] = one._replace(amount=amount, longest_us=max(one.longest_us, end.us))
        return list(carried.values())

    def pop_lost_moves(self) -> list[Move]:
        """Forget all moves, since the worker is gone, and release their pages; the owners are not called. Returns the
        moves that were in flight."""
        moves, self._moves = self._moves, {}
        for move_id, move in moves.items():
            self._release(move_id, move)
        self._outgoing.clear()
        self._cancelled.clear()
        return list(moves.values())

    def items(self) -> list[tuple[int, Move]]:
        """Return the moves in flight with their ids."""
        return list(self._moves.items())

    def all(self) -> list[Move]:
        """Return the moves in flight."""
        return list(self._moves.values())

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts of stores and of their pages disagree with the moves in flight, or if the
        next Grant would carry a move that has ended."""
        stores = {move_id for move_id, move in self._moves.items() if move.kind is MoveKind.STORE}
        require(stores == self._began_s.keys(), "stores were miscounted")
        pages = sum(len(self._moves[move_id].pages) for move_id in stores)
        require(pages == self.storing_pages, "pages on their way to the kvstore were miscounted")
        require({move.id for move in self._outgoing} <= self._moves.keys(), "a move goes out that has ended")

    def pages(self, *, written: bool) -> list[tuple[int, Sequence[int]]]:
        """Return the pages, as (group, pages), of the moves in flight that write them, or with `written` False, read
        them."""
        return [(move.group, move.pages) for move in self._moves.values() if (move.kind in _WRITES) == written]

    def _release(self, move_id: int, move: Move) -> None:
        """Release the pages of a move that has ended: drop its references, or end its loan. A store's pages are no
        longer counted as on their way."""
        if move.kind in _WRITES:
            self._pools.release(move.group, move.pages)
        else:
            self._pools.returned(move.group, move.pages)
        if self._began_s.pop(move_id, None) is not None:
            self.storing_pages -= len(move.pages)


def _to_carry(move_id: int, move: Move, context: RequestContext) -> PageMove:
    """Return the move in the form in which a Grant carries it. An export or a pull has its ticket's id (as the lease),
    key and number of tail tokens. A pull also has the ticket's sources and the index of its first page. Without a
    ticket, the move keeps its own lease, which only a load has."""
    pages, ticket, pulls = np.array(move.pages, np.int32), move.ticket, move.kind is MoveKind.PULL
    if ticket is None:
        return PageMove(move_id, move.kind, move.group, pages, move.hashes, move.lease, context=context)
    return PageMove(
        move_id,
        move.kind,
        move.group,
        pages,
        move.hashes,
        ticket.transfer_id,
        context=context,
        tail_tokens=ticket.tail_tokens,
        lease_key=ticket.lease_key,
        first_index=move.first if pulls else 0,
        source=ticket.sources if pulls else (),
    )

"""Page moves in flight, loads and stores, from the Grant that carries them to the Report of their end.

Pages of a load have a reference of the move's own, whatever happens to the request; pages of a store are lent to it.
Knows nothing of leases' ends or of why pages move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.credit import MoveKind, PageMove
from quire_scheduler.invariant import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.sequence import RequestContext
    from quire_scheduler.page_pools import PagePools
    from quire_scheduler.request import Request


_LATE_S = 0.25


class Move(NamedTuple):
    """Pages of a chain, from the request's page `first` on. A store may belong to no request."""

    kind: MoveKind
    group: int
    pages: list[int]
    hashes: tuple[bytes, ...]
    request: Request | None = None
    first: int = 0
    lease: bytes = b""
    medium: str = ""


class PageMoves:
    """One core's."""

    def __init__(self, pools: PagePools) -> None:
        self.storing_pages = 0
        # Stores, oldest first, by when they began.
        self._began_s: dict[int, float] = {}
        self._pools = pools
        self._moves: dict[int, Move] = {}
        self._next = 1
        self._outgoing: list[PageMove] = []

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def outgoing(self) -> bool:
        """Whether a Grant has moves to carry."""
        return bool(self._outgoing)

    @property
    def stores(self) -> int:
        """Of these, to the kvstore."""
        return len(self._began_s)

    def are_late(self, now: float) -> bool:
        """Whether a store takes so long that nobody should wait for its pages."""
        return bool(self._began_s) and now - next(iter(self._began_s.values())) > _LATE_S

    def begin(self, move: Move, context: RequestContext, now: float) -> None:
        """With the next Grant."""
        if move.kind is MoveKind.LOAD:
            self._pools.retain(move.group, move.pages)
        else:
            self._pools.lend(move.group, move.pages)
            self._began_s[self._next] = now
            self.storing_pages += len(move.pages)
        self._moves[self._next] = move
        pages = np.array(move.pages, np.int32)
        self._outgoing.append(
            PageMove(self._next, move.kind, move.group, pages, move.hashes, move.lease, context=context)
        )
        self._next += 1

    def take(self) -> list[PageMove]:
        """Moves for the next Grant."""
        moves, self._outgoing = self._outgoing, []
        return moves

    def ended(self, move_id: int) -> Move | None:
        """The worker reported it; None where it is not known. `release` its pages when they are dealt with."""
        self._began_s.pop(move_id, None)
        return self._moves.pop(move_id, None)

    def release(self, move: Move) -> None:
        """Let go of the pages of one that has ended."""
        if move.kind is MoveKind.LOAD:
            self._pools.release(move.group, move.pages)
        else:
            self._pools.returned(move.group, move.pages)
            self.storing_pages -= len(move.pages)

    def lost(self) -> list[Move]:
        """The worker is gone, no move will be reported: returns those that were in flight."""
        moves = list(self._moves.values())
        for move in moves:
            self.release(move)
        self._moves.clear()
        self._began_s.clear()
        self._outgoing.clear()
        return moves

    def all(self) -> list[Move]:
        """Those in flight."""
        return list(self._moves.values())

    def check_integrity(self) -> None:
        """Counts agree with what is in flight."""
        stores = {move_id for move_id, move in self._moves.items() if move.kind is MoveKind.STORE}
        require(stores == self._began_s.keys(), "stores were miscounted")
        pages = sum(len(self._moves[move_id].pages) for move_id in stores)
        require(pages == self.storing_pages, "pages on their way to the kvstore were miscounted")
        require({move.id for move in self._outgoing} <= self._moves.keys(), "a move goes out that has ended")

    def pages(self, kind: MoveKind) -> list[tuple[int, Sequence[int]]]:
        """Of the moves in flight, by group."""
        return [(move.group, move.pages) for move in self._moves.values() if move.kind is kind]

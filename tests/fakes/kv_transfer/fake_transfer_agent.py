"""A KV transfer agent whose moves end when the test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_worker.engine.transfer_agent import MoveResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit import PageMove


class FakeTransferAgent:
    """`taken` are moves that run; `end` ends one. `full` refuses new ones."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.taken: dict[int, PageMove] = {}
        self.offered: dict[int, int] = {}
        self.full = False
        self.cancelled = 0
        self._ended: list[MoveResult] = []

    def submit(self, move: PageMove) -> bool:
        if not self.full:
            self.taken[move.id] = move
        return not self.full

    def end(self, move_id: int, pages: int | None = None) -> None:
        """All pages of the move arrived, or so many."""
        move = self.taken.pop(move_id)
        arrived = len(move.device_page) if pages is None else pages
        self._ended.append(MoveResult(move_id, arrived == len(move.device_page), arrived, 5))

    def offer_pages(self, move_id: int, pages: int) -> None:
        self.offered[move_id] = pages

    def end_move(self, move_id: int) -> None:
        move = self.taken.pop(move_id, None)
        if move is not None:
            self._ended.append(MoveResult(move_id, ok=False, pages=0, us=5))

    def take_results(self) -> list[MoveResult]:
        ended, self._ended = self._ended, []
        return ended

    def cancel_all(self) -> None:
        self.cancelled += 1
        self.taken.clear()

    def close(self) -> None:
        self.cancel_all()

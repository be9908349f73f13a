"""Movers: several as one, each with the kinds of moves that are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quire_common.credit import MoveKind, PageMove
    from quire_worker.engine.moves import Mover, MoveResult


class Movers:
    """See Mover. Kinds that are nobody's are refused."""

    def __init__(self, by_kind: Mapping[MoveKind, Mover]) -> None:
        self._by_kind = by_kind
        self._all = list(dict.fromkeys(by_kind.values()))
        self._by_move: dict[int, Mover] = {}

    @property
    def wake(self) -> Callable[[], None]:
        """See Mover."""
        return self._wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        for mover in self._all:
            mover.wake = wake

    def submit(self, move: PageMove) -> bool:
        """See Mover."""
        mover = self._by_kind.get(move.kind)
        if mover is None or move.id in self._by_move or not mover.submit(move):
            return False
        self._by_move[move.id] = mover
        return True

    def offer(self, move_id: int, pages: int) -> None:
        """See Mover."""
        if move_id in self._by_move:
            self._by_move[move_id].offer(move_id, pages)

    def end_early(self, move_id: int) -> None:
        """See Mover."""
        if move_id in self._by_move:
            self._by_move[move_id].end_early(move_id)

    def finished(self) -> list[MoveResult]:
        """See Mover."""
        ended = [result for mover in self._all for result in mover.finished()]
        for result in ended:
            del self._by_move[result.id]
        return ended

    def cancel(self) -> None:
        """See Mover."""
        self._by_move.clear()
        for mover in self._all:
            mover.cancel()

    def close(self) -> None:
        """See Mover."""
        self._by_move.clear()
        for mover in self._all:
            mover.close()

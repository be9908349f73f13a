"""AgentsByKind: several agents as one, each with the kinds of moves that are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quire_common.credit import MoveKind, PageMove
    from quire_worker.engine.transfer_agent import KvTransferAgent, MoveResult


class AgentsByKind:
    """Implements KvTransferAgent. Kinds that are nobody's are refused."""

    def __init__(self, by_kind: Mapping[MoveKind, KvTransferAgent]) -> None:
        self._by_kind = by_kind
        self._all = list(dict.fromkeys(by_kind.values()))
        self._by_move: dict[int, KvTransferAgent] = {}

    @property
    def wake(self) -> Callable[[], None]:
        return self._wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        for transfer_agent in self._all:
            transfer_agent.wake = wake

    def submit(self, move: PageMove) -> bool:
        transfer_agent = self._by_kind.get(move.kind)
        if transfer_agent is None or move.id in self._by_move or not transfer_agent.submit(move):
            return False
        self._by_move[move.id] = transfer_agent
        return True

    def offer_pages(self, move_id: int, pages: int) -> None:
        if move_id in self._by_move:
            self._by_move[move_id].offer_pages(move_id, pages)

    def end_move(self, move_id: int) -> None:
        if move_id in self._by_move:
            self._by_move[move_id].end_move(move_id)

    def take_results(self) -> list[MoveResult]:
        ended = [result for transfer_agent in self._all for result in transfer_agent.take_results()]
        for result in ended:
            del self._by_move[result.id]
        return ended

    def cancel_all(self) -> None:
        self._by_move.clear()
        for transfer_agent in self._all:
            transfer_agent.cancel_all()

    def close(self) -> None:
        self._by_move.clear()
        for transfer_agent in self._all:
            transfer_agent.close()

"""KV transfer agents that are made of others: AgentOnDemand, which starts one when it is needed, and AgentsByKind,
several as one.

Most workers never exchange pages with others: they pay neither for the process nor for its ring. Where nobody said that
there will be moves, the first ones wait for some tenths of a second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire_common.telemetry.logs import get_logger
from quire_worker.engine.transfer_agent import KvTransferAgent, MoveResult, NoTransferAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quire_common.credit import MoveKind, PageMove
    from quire_worker.engine.transfer_agent import KvTransferAgent, MoveResult


log = get_logger(__name__)
MAX_WAITING = 128


class AgentOnDemand:
    """Implements KvTransferAgent."""

    def __init__(self, make: Callable[[], KvTransferAgent]) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._make = make
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._made: KvTransferAgent | None = None
        self._transfer_agent: KvTransferAgent | None = None
        self._waiting: dict[int, PageMove] = {}
        self._offered: dict[int, int] = {}
        self._ended: list[MoveResult] = []

    def begin(self) -> None:
        """Make it now, if it is not there or on its way. From any thread; returns at once."""
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._main, name="mover-start", daemon=True)
                self._thread.start()

    def submit(self, move: PageMove) -> bool:
        if self._transfer_agent is not None:
            return self._transfer_agent.submit(move)
        if move.id in self._waiting or len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting[move.id] = move
        self.begin()
        return True

    def offer_pages(self, move_id: int, pages: int) -> None:
        if self._transfer_agent is not None:
            self._transfer_agent.offer_pages(move_id, pages)
        else:
            self._offered[move_id] = pages

    def end_move(self, move_id: int) -> None:
        if self._transfer_agent is not None:
            self._transfer_agent.end_move(move_id)
        elif self._waiting.pop(move_id, None) is not None:
            self._fail(move_id)

    def take_results(self) -> list[MoveResult]:
        if self._transfer_agent is None and self._made is not None:
            self._begin(self._made)
        ended, self._ended = self._ended, []
        return ended if self._transfer_agent is None else ended + self._transfer_agent.take_results()

    def cancel_all(self) -> None:
        self._waiting.clear()
        self._offered.clear()
        self._ended.clear()
        if self._transfer_agent is not None:
            self._transfer_agent.cancel_all()

    def close(self) -> None:
        self._waiting.clear()
        with self._starting:
            self._closed = True
        if self._thread is not None:
            self._thread.join()
        if self._made is not None:
            self._made.close()

    def _main(self) -> None:
        try:
            self._made = self._make()
        except Exception:
            log.exception("there is no transfer agent: moves fail")
            self._made = NoTransferAgent()
        self.wake()

    def _begin(self, transfer_agent: KvTransferAgent) -> None:
        self._transfer_agent = transfer_agent
        transfer_agent.wake = self.wake
        for move in self._waiting.values():
            if not transfer_agent.submit(move):
                self._fail(move.id)
            elif move.id in self._offered:
                transfer_agent.offer_pages(move.id, self._offered[move.id])
        self._waiting.clear()
        self._offered.clear()

    def _fail(self, move_id: int) -> None:
        self._ended.append(MoveResult(move_id, ok=False, pages=0, us=0))


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

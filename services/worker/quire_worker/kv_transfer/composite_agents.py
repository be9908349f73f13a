"""KV transfer agents that consist of others: AgentOnDemand, which starts an agent when it is first needed, and
AgentsByKind, which combines several.

Most workers never exchange pages with others, so they should pay neither for the process nor for its ring. Unless moves
are announced at the start, the first moves wait for some tenths of a second.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from quire_common.telemetry.logs import get_logger
from quire_worker.engine.transfer_agent import MoveResult, NoTransferAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quire_common.credit import MoveKind, PageMove
    from quire_worker.engine.transfer_agent import KvTransferAgent


log = get_logger(__name__)
MAX_WAITING = 128


class AgentOnDemand:
    """A KvTransferAgent that makes the real agent when it is first needed. Until the agent exists, moves wait here."""

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
        """Begin to make the agent on a thread, unless it exists, is being made, or this is closed. From any thread;
        returns at once."""
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._main, name="mover-start", daemon=True)
                self._thread.start()

    def submit(self, move: PageMove) -> bool:
        """Pass the move to the agent. While there is none, begin to make it, and keep the move until then. Returns
        False if the agent refuses the move, it is known already, MAX_WAITING moves wait, or this is closed."""
        if self._closed:
            return False
        if self._transfer_agent is not None:
            return self._transfer_agent.submit(move)
        if move.id in self._waiting or len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting[move.id] = move
        self.begin()
        return True

    def offer_pages(self, move_id: int, pages: int) -> None:
        """Pass an offer to the agent, or keep it until the agent exists if its move waits here. Of several offers of
        one move, the latest is kept."""
        if self._transfer_agent is not None:
            self._transfer_agent.offer_pages(move_id, pages)
        elif move_id in self._waiting:
            self._offered[move_id] = pages

    def end_move(self, move_id: int) -> None:
        """Have the agent end a move; a move that still waits here ends as failed at once, and its offer is
        forgotten."""
        if self._transfer_agent is not None:
            self._transfer_agent.end_move(move_id)
        elif self._waiting.pop(move_id, None) is not None:
            self._offered.pop(move_id, None)
            self._fail(move_id)

    def take_results(self) -> list[MoveResult]:
        """Return the results of the moves that have ended, here and in the agent. If the agent has just been made,
        first pass the waiting moves on to it."""
        if self._transfer_agent is None and self._made is not None:
            self._begin(self._made)
        ended, self._ended = self._ended, []
        return ended if self._transfer_agent is None else ended + self._transfer_agent.take_results()

    def cancel_all(self) -> None:
        """Forget the moves that wait here and the results that were not taken, and have the agent cancel its own
        moves."""
        self._waiting.clear()
        self._offered.clear()
        self._ended.clear()
        if self._transfer_agent is not None:
            self._transfer_agent.cancel_all()

    def close(self) -> None:
        """Forget the waiting moves and their offers, wait for the agent if it is being made, and close it. From now on
        no agent is made, and `submit` refuses all moves."""
        self._waiting.clear()
        self._offered.clear()
        with self._starting:
            self._closed = True
        if self._thread is not None:
            self._thread.join()
        if self._made is not None:
            self._made.close()

    def _main(self) -> None:
        """Make the agent, on its starting thread, and call `wake`. If that fails, the error is logged, and an agent
        that refuses all moves takes its place."""
        try:
            self._made = self._make()
        except Exception:
            log.exception("there is no transfer agent: moves fail")
            self._made = NoTransferAgent()
        self.wake()

    def _begin(self, transfer_agent: KvTransferAgent) -> None:
        """Use the agent from now on: submit the moves that wait, with their offers; those that it refuses end as
        failed."""
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
    """A KvTransferAgent that passes each move to the agent of its kind, and refuses kinds that have none."""

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
        """Pass the move to the agent of its kind; returns False if there is none, the move is known already, or the
        agent refuses it."""
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
        """Return the results of the moves that have ended, of all agents, and forget these moves."""
        ended = [result for transfer_agent in self._all for result in transfer_agent.take_results()]
        for result in ended:
            del self._by_move[result.id]
        return ended

    def cancel_all(self) -> None:
        """Forget all moves, and have each agent cancel its own."""
        self._by_move.clear()
        for transfer_agent in self._all:
            transfer_agent.cancel_all()

    def close(self) -> None:
        """Forget all moves, and close all agents. If an agent raises, the others are closed all the same, and the error
        is raised at the end."""
        self._by_move.clear()
        with contextlib.ExitStack() as stack:
            for transfer_agent in reversed(self._all):
                stack.callback(transfer_agent.close)

"""MoveManager: hands page moves to the KV transfer agent, and updates the states of their pages as moves end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.credit import MoveKind
from quire_common.errors import Internal
from quire_worker.engine.export_offers import ExportOffers
from quire_worker.engine.transfer_agent import POOL_FILLING, KvTransferAgent, MoveResult

if TYPE_CHECKING:
    from quire_common.credit import PageMove
    from quire_worker.engine.ports import Observer
    from quire_worker.engine.report_draft import ReportDraft
    from quire_worker.engine.resident_slots import ResidentSlots


class MoveManager:
    """Belongs to the model thread. Each move is reported exactly once, even if it was refused at once, but not if
    `cancel` comes before its report."""

    def __init__(
        self, residents: ResidentSlots, transfer_agent: KvTransferAgent, draft: ReportDraft, observer: Observer
    ) -> None:
        self._residents = residents
        self._transfer_agent = transfer_agent
        self._draft = draft
        self._observer = observer
        self._exports = ExportOffers(residents.states, transfer_agent)
        self._open: dict[int, PageMove] = {}

    def submit(self, move: PageMove) -> None:
        """Hand a move to the KV transfer agent. A load or pull marks its pages as pending, an export is registered for
        offers. If the move is impossible or the agent refuses it, it is reported as failed at once. Pages that it
        should have filled then count as failed if the agent refused it, so that a sequence may compute them itself. If
        it is impossible, those that nobody else fills count as empty (see ResidentSlots.void), and a sequence that
        waits for them ends with PAGES_LOST."""
        possible = self._is_possible(move)
        if possible and move.kind in POOL_FILLING:
            self._residents.states.expect(move.device_page)
        if possible and self._transfer_agent.submit(move):
            self._open[move.id] = move
            if move.kind == MoveKind.EXPORT:
                self._exports.begin(move)
            return
        if possible and move.kind in POOL_FILLING:
            self._residents.states.arrived(move.device_page, 0)
        elif move.kind in POOL_FILLING:
            self._residents.void(move.device_page)
        self._note(move, MoveResult(move.id, ok=False, pages=0, us=0))

    def end_early(self, move_id: int) -> None:
        """Have the KV transfer agent end a move that the scheduler no longer needs; its result is reported as usual. A
        move that has ended already is ignored."""
        if move_id in self._open:
            self._transfer_agent.end_move(move_id)

    def collect(self) -> None:
        """Offer filled pages of exports, then take in ended moves: update the states of their pages, and add their
        results to the next Report. Results of moves that are not open are ignored."""
        self._exports.offer_ready()
        for result in self._transfer_agent.take_results():
            move = self._open.pop(result.id, None)
            if move is None:
                continue
            if move.kind in POOL_FILLING:
                self._residents.states.arrived(move.device_page, result.pages, move.tail_tokens)
            elif move.kind == MoveKind.EXPORT:
                self._exports.end(move.id)
            self._note(move, result)

    def cancel(self) -> None:
        """Cancel all open moves and report none of them; no page is touched on their behalf afterwards. The caller
        clears the pages' marks, and the results that are in the draft already."""
        self._transfer_agent.cancel_all()
        self._transfer_agent.take_results()
        self._exports.clear()
        self._open.clear()

    def check_integrity(self) -> None:
        """Raise Internal unless the pages marked as pending are exactly those that open moves will fill, and those
        marked as exported agree with the exports (see ExportOffers)."""
        awaited = {int(page) for m in self._open.values() if m.kind in POOL_FILLING for page in m.device_page}
        if awaited != set(self._residents.states.pending.nonzero()[0].tolist()):
            raise Internal("INTEGRITY", "Awaited pages and open moves differ.", "Report it with the worker's log.")
        self._exports.check_integrity()

    def _is_possible(self, move: PageMove) -> bool:
        """Whether the move can begin. Its id must be of no open move, its KV group 0 and its kind known, and it must
        have one hash per page. Its pages must be in a state that allows this kind, as ResidentSlots says."""
        if move.group != 0 or move.id in self._open or len(move.hashes) != len(move.device_page):
            return False
        residents, pages = self._residents, move.device_page
        if move.kind == MoveKind.EXPORT:
            return residents.can_export(pages, move.tail_tokens)
        if move.kind == MoveKind.PULL:
            return residents.can_pull(pages, move.tail_tokens)
        if move.kind == MoveKind.LOAD:
            return residents.can_load(pages)
        return move.kind == MoveKind.STORE and residents.can_store(pages)

    def _note(self, move: PageMove, result: MoveResult) -> None:
        """Add a move's result to the next Report, and tell the observer."""
        self._draft.moves.append(result)
        self._observer.moved(move.kind, result.pages, result.us, result.ok)

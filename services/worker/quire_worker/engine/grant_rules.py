"""GrantRules: applies each part of a Grant to slots and pages, in the contract's order.

A part that does not fit is an error of its slot only. A whole Grant is refused only if it does not follow the last
Grant, or if its budget allows no prefill (check_follows). Stops, limits and page growth for idle slots are ignored: the
sequence has ended before the scheduler could know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.credit import Finish
from quire_common.errors import FailedPrecondition, InvalidArgument, QuireError
from quire_worker.engine.slots import NOT_ORDERED, SlotState

if TYPE_CHECKING:
    from quire_common.credit import Budget, Epoch, Grant, Start
    from quire_worker.arrays import Int32
    from quire_worker.engine.move_manager import MoveManager
    from quire_worker.engine.report_draft import ReportDraft
    from quire_worker.engine.resident_slots import ResidentSlots


class GrantRules:
    """Applies the Grants' parts to slots, pages and moves. Belongs to the model thread."""

    def __init__(self, residents: ResidentSlots, moves: MoveManager, draft: ReportDraft) -> None:
        self._residents = residents
        self._moves = moves
        self._draft = draft

    def apply(self, grant: Grant) -> None:
        """Apply a Grant's stops, starts, limits, grown pages, prefill order, moves and cancellations, in this order.
        The engine itself applies the budget. A slot's error goes into the draft, for a Report that comes when this
        Grant has retired."""
        for slot in grant.stop_slot.tolist():
            if self._residents.holds(slot):
                self._residents.stop(slot)
        for start in grant.start:
            self._start(start, grant.seq)
        self._set_limits(grant.limit_slot, grant.limit_position)
        if len(grant.grow_slot):
            self._grow_all(grant)
        self._set_order(grant.order_slot)
        for move in grant.move:
            self._moves.submit(move)
        for move_id in grant.cancel_move.tolist():
            self._moves.end_early(move_id)

    def _start(self, start: Start, seq: int) -> None:
        """Start a sequence in its slot. On failure, the error goes into the draft, and the pages after the cached range
        count as empty (see ResidentSlots.void). If the slot does not exist or is busy, that is such a failure; the
        sequence in a busy slot ends too."""
        slot, num_slots = start.slot, self._residents.spec.num_slots
        try:
            if not 0 <= slot < num_slots:
                raise InvalidArgument("BAD_SLOT", f"There is no slot {slot}.", f"Use 0..{num_slots - 1}.")
            if self._residents.holds(slot):
                # The sequence in the slot ends too: its later tokens would be taken for those of the new sequence.
                busy = FailedPrecondition(
                    "SLOT_BUSY", f"Slot {slot} still held a sequence; both were ended.", "Stop a slot before its start."
                )
                self._residents.end(slot, Finish.ERROR, busy)
                raise busy
            self._residents.start(start)
        except QuireError as error:
            self._draft.add_error(seq, slot, error)
            for table in start.pages:
                self._residents.void(table[-(-start.cached_len // self._residents.spec.page_size) :])

    def _set_limits(self, slots: Int32, positions: Int32) -> None:
        """Set the position limits of the slots that hold a sequence. Idle slots, and slots that do not exist, are
        ignored."""
        table = self._residents.table
        real = (slots >= 0) & (slots < self._residents.spec.num_slots)
        slots, positions = slots[real], positions[real]
        held = table.state[slots] != SlotState.IDLE
        table.limit[slots[held]] = positions[held]

    def _grow_all(self, grant: Grant) -> None:
        """Append the Grant's pages to their slots' page tables. A Grant may bring hundreds, so valid pages are appended
        in one operation. If one may be invalid, the pages are appended one by one, so that an error ends only its own
        slot."""
        slots, groups, pages = grant.grow_slot, grant.grow_group, grant.grow_page
        if slots.min() >= 0 and slots.max() < self._residents.spec.num_slots and not groups.any():
            held = self._residents.table.state[slots] != SlotState.IDLE
            if not held.any() or self._residents.grow_all(slots[held], pages[held]):
                return
        for slot, group, page in zip(slots.tolist(), groups.tolist(), pages.tolist(), strict=True):
            self._grow(slot, group, page, grant.seq)

    def _grow(self, slot: int, group: int, page: int, seq: int) -> None:
        """Append a page to a slot's page table. An error (an unknown KV group, a page that is invalid or taken, a full
        table) ends the slot's sequence and goes into the draft. Idle slots are ignored."""
        if not self._residents.holds(slot):
            return
        try:
            if group != 0:
                raise InvalidArgument("BAD_KV_GROUP", f"There is no KV group {group}.", "Use the groups of the hello.")
            self._residents.grow(slot, page)
        except QuireError as error:
            self._draft.add_error(seq, slot, error)
            self._residents.end(slot, Finish.ERROR, error)

    def _set_order(self, slots: Int32) -> None:
        """Rank the slots for prefill in this order; all others become unordered, and slots that hold no sequence are
        ignored. An empty column means that the order did not change."""
        if not len(slots):
            return
        rank = self._residents.table.prefill_rank
        rank.fill(NOT_ORDERED)
        real = (slots >= 0) & (slots < self._residents.spec.num_slots)
        slots, place = slots[real], real.nonzero()[0]
        held = self._residents.table.state[slots] != SlotState.IDLE
        rank[slots[held]] = place[held]


def check_follows(grant: Grant, epoch: Epoch, applied: int) -> None:
    """Raise FailedPrecondition for a Grant of another epoch, or whose number is not `applied` + 1, and InvalidArgument
    for a budget that allows no prefill."""
    if grant.epoch != epoch:
        raise FailedPrecondition(
            "EPOCH_MISMATCH",
            f"The Grant is of run {grant.epoch.run} of another boot or run; this is run {epoch.run}.",
            "Attach again and use the epoch of the worker's hello.",
        )
    if grant.seq != applied + 1:
        raise FailedPrecondition(
            "GRANT_OUT_OF_ORDER",
            f"Grant {grant.seq} came after Grant {applied}.",
            "Number the Grants of a run 1, 2, 3 and so on.",
        )
    if grant.budget is not None:
        _check_budget(grant.budget)


def _check_budget(budget: Budget) -> None:
    """Raise InvalidArgument BAD_BUDGET for a budget whose tokens per step, chunk cap or partial prefills are less than
    1."""
    if min(budget.tokens_per_step, budget.chunk_cap, budget.partial_prefills) < 1:
        raise InvalidArgument(
            "BAD_BUDGET",
            "The budget allows no prefill.",
            "Send tokens_per_step, chunk_cap and partial_prefills of at least 1.",
            param="budget",
        )

"""OutputProcessor: applies the worker's Reports to the replica. New tokens go to their requests, finished sequences
end, and finished page moves are settled.

A row of a Report is the result of one slot in one step: one token, several, or none if the worker held the row back. A
row normally belongs to the slot's present holder, the request that has the slot now. A late row belongs to a former
holder: its step was launched before the request left the slot. Rows of present holders are processed as arrays, with no
Python object per row, whatever their number of tokens; only late rows, first tokens and ends are handled one by one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import Internal, QuireError
from quire_common.finish import FINISH_REASONS, FinishReason
from quire_scheduler.core.lifecycle import PAGES_LOST
from quire_scheduler.core.outputs import Rows
from quire_scheduler.core.request import Request, State
from quire_scheduler.kv.offload import BATCH_PAGES
from quire_scheduler.kv.page_allocator import Fence
from quire_scheduler.kv.page_identity import identify
from quire_scheduler.kv.page_moves import MoveEnd

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from quire_common.credit import Report
    from quire_scheduler.core.lifecycle import Lifecycle
    from quire_scheduler.core.replica import Replica


class OutputProcessor:
    """Applies one Report at a time. Each Report is of the replica's epoch. A page is named when its block hash is
    recorded, so that caches can find it. A fence says which Grant or step must be over before pages are used again."""

    def __init__(self, replica: Replica, lifecycle: Lifecycle) -> None:
        self._replica = replica
        self._lifecycle = lifecycle
        self._completed = -1

    def update_from_report(self, report: Report, now: float) -> None:
        """Apply the Report in this order: ended moves, page fences, prefill progress, prompt logprobs, rows of tokens
        and errors, full pages for the kvstore, retired stops, statistics. Stops are retired after the rows, because the
        Grant that a step had applied decides to which request a late row belongs."""
        replica, steps = self._replica, report.steps
        if steps:
            self._completed = max(self._completed, report.first_step + steps - 1)
        fence = Fence(step=self._completed + report.in_flight)
        if len(report.moved_id):
            self._settle_moves(report, now)
        # This comes before rows end sequences: pages that no step uses any more are then free at once.
        replica.pools.advance(report.retired, self._completed)
        if len(report.prefill_slot):
            self._update_prefill(report)
        if report.prompt_logprobs:
            self._prompt_logprobs(report)
        if len(report.slot):
            self._update_rows(report, fence, now)
        elif report.error:
            self._handle_errors(report.error, fence, now)
        if replica.kv.offload.early and replica.slots.num_active:
            self._name_full_pages()
        replica.kv.cost.measure_steps(report)
        if stopped := replica.slots.retire(report.retired):
            self._lifecycle.retired(stopped)
        if steps:
            prefill = sum(report.step_prefill_tokens.tolist())
            replica.stats.stepped(steps, len(report.token), prefill)
            replica.rates.step(now, steps, len(report.token), prefill)
        if not replica.slots.num_active:
            replica.rates.idle()

    def _settle_moves(self, report: Report, now: float) -> None:
        """Settle the moves that have ended: their owners are told and the pages are released. Then update the measured
        speeds of stores, loads and pulls."""
        failed = report.moved_status.astype(np.bool_).tolist()
        columns = (report.moved_id.tolist(), failed, report.moved_pages.tolist(), report.moved_us.tolist())
        for carried in self._replica.moves.ended(map(MoveEnd._make, zip(*columns, strict=True)), now):
            self._replica.kv.cost.moved(carried, now)
            self._replica.pulls.measured(carried, now)

    def _update_prefill(self, report: Report) -> None:
        """Record how far the prefill of each slot has come, and name the pages that are now full. An entry is skipped
        if its slot is free or does not exist, or if it may belong to the slot's former sequence."""
        slots = self._replica.slots
        first = int(report.step_applied[0]) if report.steps else 0
        for slot, position in zip(report.prefill_slot.tolist(), report.prefill_position.tolist(), strict=True):
            request = slots.holder[slot] if 0 <= slot < slots.num_slots else None
            if request is None or (slots.may_have_former_rows(slot) and slots.start_seq[slot] > first):
                # The entry may belong to the slot's former sequence; a later Report tells of the present one.
                continue
            slots.computed[slot] = position
            self._replica.cache.computed(request, position)

    def _name_full_pages(self) -> None:
        """Name the full pages of the running sequence that has the most unnamed ones, and offer them to the kvstore.
        Nothing happens below 8 pages. One sequence per Report is handled, so that each move carries more pages."""
        slots, cache = self._replica.slots, self._replica.cache
        slot = slots.longest_unnamed(BATCH_PAGES * self._replica.page_size)
        if slot is None:
            return
        slots.settle_output(slot)
        request, computed = slots.held(slot), slots.ready_len(slot)
        slots.named[slot] = computed
        identify(request, self._replica.page_size)
        cache.computed(request, computed)
        self._replica.kv.offload.store_new_pages(request)

    def _prompt_logprobs(self, report: Report) -> None:
        """Add each chunk of prompt logprobs to the outputs of the request that held its slot when the chunk was
        computed; chunks of ended requests are dropped. All prefills of a Report ran under one Grant. Raises Internal
        for a slot that does not exist."""
        slots = self._replica.slots
        for chunk in report.prompt_logprobs:
            if not 0 <= chunk.owner < slots.num_slots:
                raise Internal("BAD_SLOT", "The worker scored a slot that it does not have.", "See the worker's log.")
            request = slots.held_at(chunk.owner, int(report.step_applied[0]))
            if request is not None and request.state is not State.FINISHED:
                self._replica.outputs.prompt_logprobs(request.session, replace(chunk, owner=request.handle))

    def _update_rows(self, report: Report, fence: Fence, now: float) -> None:
        """Append the Report's tokens to their requests (late rows to those that held the slot before), and handle first
        tokens. Then end the requests that finished, failed or were only to be prefilled, handle errors without a row,
        and pass the rows to the sessions. Rows of ended requests, rows of errors, and rows without token or end are
        left out. Raises Internal for a slot that does not exist."""
        slots = self._replica.slots
        slot, finish = report.slot, report.finish
        if int(slot.view(np.uint32).max()) >= slots.num_slots:
            raise Internal("BAD_SLOT", "The worker reported a slot that it does not have.", "See the worker's log.")
        applied = report.step_applied.repeat(report.step_rows)
        present = slots.held_since(slot, applied)
        with_tokens = int(np.count_nonzero(report.count))
        # The counts add up to the number of tokens: if no count is 0, all are 1.
        single = len(slot) == len(report.token) == with_tokens
        mine = len(slot) == np.count_nonzero(present)
        ends = bool(np.count_nonzero(finish))
        reasons = FINISH_REASONS[finish] if ends else finish
        rows = Rows(slots.session[slot], slots.handle[slot], report.count, report.token, reasons, report.logprobs)
        owners: dict[int, Request | None] = {}
        drop = list[int]()
        if not mine:
            owners = {i: slots.held_at(int(slot[i]), int(applied[i])) for i in np.flatnonzero(~present).tolist()}
            self._append_late(report, rows, owners)
            drop = [index for index, request in owners.items() if request is None or request.state is State.FINISHED]
        if single and mine:
            self._append(report)
        else:
            self._append_rows(report, present)
        heads = self._first_rows(report, present) if slots.num_prefilling else []
        self._first_tokens(heads, now)
        if ends:
            drop += self._end_finished(report, rows, owners, fence, now)
        elif report.error:
            self._handle_errors(report.error, fence, now)
        if heads or owners:
            self._end_prefilled(heads, owners.values(), now)
        if drop or with_tokens < len(slot):
            # A row that was held back brings neither a token nor an end.
            keep = (report.count != 0) | (finish != 0)
            keep[drop] = False
            rows = rows.select(keep)
        self._replica.outputs.add_rows(rows)

    def _append(self, report: Report) -> None:
        """Append the tokens in the usual case: each row is one token of its slot's present holder. Where all steps have
        the same slots, the tokens are appended in one call."""
        slots, steps, rows, at = self._replica.slots, report.steps, int(report.step_rows[0]), 0
        if 1 < steps <= slots.tokens.most and rows * steps == len(report.slot):
            grid = report.slot.reshape(steps, rows)
            if (grid[1:] == grid[0]).all():
                slots.append_tokens(grid[0], report.token.reshape(steps, rows))
                return
        for rows in report.step_rows.tolist():
            slots.append_tokens(report.slot[at : at + rows], report.token[None, at : at + rows])
            at += rows

    def _first_rows(self, report: Report, present: NDArray[np.bool_]) -> list[int]:
        """Return the slots whose `present` holders have sampled their first token since they were started."""
        first = self._replica.slots.prefilling[report.slot]
        heads: list[int] = report.slot[first & (report.count > 0) & present].tolist()
        return heads

    def _append_rows(self, report: Report, present: NDArray[np.bool_]) -> None:
        """Append, step by step, the tokens of the rows that belong to their slots' `present` holders; other rows are
        skipped. A row may have any number of tokens."""
        slots, ends, at, first = self._replica.slots, report.count.cumsum(), 0, 0
        every = bool(present.all())
        for rows in report.step_rows.tolist():
            if not rows:
                continue
            slot, count = report.slot[at : at + rows], report.count[at : at + rows]
            last = int(ends[at + rows - 1])
            token = report.token[first:last]
            if not every:
                mine = present[at : at + rows]
                slot, count, token = slot[mine], count[mine], token[mine.repeat(count)]
            if len(slot):
                slots.append_rows(slot, count, token)
            at, first = at + rows, last

    def _append_late(self, report: Report, rows: Rows, owners: dict[int, Request | None]) -> None:
        """Append the tokens of late rows to the outputs of their requests (`owners`, by row index), unless these have
        ended. Write the sessions and handles of these requests into `rows`. All tokens of late rows are counted."""
        ends = report.count.cumsum()
        for index, request in owners.items():
            count, end = int(report.count[index]), int(ends[index])
            self._replica.stats.late(count)
            if request is not None and request.state is not State.FINISHED:
                request.output.extend(report.token[end - count : end].tolist())
                rows.session[index], rows.handle[index] = request.session, request.handle

    def _first_tokens(self, first: list[int], now: float) -> None:
        """Handle the first token of each of these slots since its request was started. The slot no longer counts as
        prefilling. Record the time, name the prompt's pages, count the prompt's tokens by the source of their KV (only
        at the request's first run that gets a token), and offer full pages to the kvstore."""
        replica = self._replica
        for slot in first:
            request = replica.slots.holder[slot]
            if request is None or not replica.slots.prefilling[slot]:
                continue
            replica.slots.end_prefill(slot)
            before = int(replica.slots.start_len[slot])
            request.timing.first_token(now, before - request.cached_tokens, before + 1 - request.prompt_len)
            replica.cache.computed(request, before)
            replica.stats.served_prompt(request, pulled=replica.pulls.was_delivered(request))
            # Not earlier: the pages of a prefill that fails before its first token may be damaged.
            replica.kv.offload.store_new_pages(request, least=1)

    def _end_prefilled(self, heads: list[int], late: Iterable[Request | None], now: float) -> None:
        """End those of these requests that are prefill-only, have sampled their token and have not ended. Requests in
        the slots `heads` still held their slots at that time. Requests in `late` had lost theirs."""
        holder = self._replica.slots.holder
        drawn = [request for slot in heads if (request := holder[slot])]
        drawn += [request for request in late if request and request.known_len > request.sequence.known_len]
        for request in drawn:
            if request.prefill_only and request.state is not State.FINISHED:
                self._lifecycle.prefilled(request, now)

    def _end_finished(
        self, report: Report, rows: Rows, owners: dict[int, Request | None], fence: Fence, now: float
    ) -> list[int]:
        """End the requests whose rows carry a finish reason, handle the errors of rows that carry an error, then handle
        the errors of slots without a row. Returns the indices of the rows that no session may see: those with an error,
        and those of requests that had ended already."""
        errors, drop = list(report.error), []
        ends = report.count.cumsum()
        ended = report.finish.nonzero()[0]
        columns = (ended.tolist(), report.slot[ended].tolist(), rows.finish[ended].tolist())
        for index, slot, code in zip(*columns, strict=True):
            reason = FinishReason(code)
            # The error belongs to this row's sequence. By now another request may hold the slot, and the error must not
            # hit it.
            error = _take_error(errors, slot) if reason is FinishReason.ERROR else None
            late = index in owners
            request = owners[index] if late else self._replica.slots.holder[slot]
            if request is not None and reason is FinishReason.ERROR:
                drop.append(index)
                self._handle_error(request, error, fence, now, late=late)
                continue
            if request is None or request.state is State.FINISHED:
                drop.append(index)
                continue
            # If the row is late, a Grant has stopped its slot and the slot is settled, but the row may still end the
            # request.
            has_token = reason is FinishReason.STOP and report.count[index]
            stop_token = int(report.token[ends[index] - 1]) if has_token else -1
            self._lifecycle.finish(request, reason, now, fence, stop_token)
        self._handle_errors(errors, fence, now)
        return drop

    def _handle_errors(self, errors: Iterable[tuple[int, QuireError]], fence: Fence, now: float) -> None:
        """Handle errors of slots without a row: the worker refused a start, or a waiting sequence will not get its
        pages. An error of a slot without a holder is ignored. If the error may belong to the slot's former sequence,
        the present one is preempted and tried again, or fails at last (see `Lifecycle.ambiguous_error`)."""
        slots = self._replica.slots
        for slot, error in errors:
            request = slots.holder[slot] if 0 <= slot < slots.num_slots else None
            if request is None:
                # The sequence was stopped meanwhile. If it was preempted, it is tried again anyway.
                continue
            if slots.may_have_former_rows(slot):
                self._lifecycle.ambiguous_error(request, error, now)
            else:
                self._handle_error(request, error, fence, now)

    def _handle_error(
        self, request: Request, error: QuireError | None, fence: Fence, now: float, *, late: bool = False
    ) -> None:
        """Fail the request by the worker's error, or start it again if the error is PAGES_LOST (see
        `Lifecycle.pages_lost`). A request that has ended is ignored unless `late`. None stands for an Internal error
        without details. `late`: the step that failed was launched before the request left its slot; then pages that the
        error (not PAGES_LOST) may have damaged are forgotten, even if the request has ended."""
        lifecycle, finished = self._lifecycle, request.state is State.FINISHED
        error = error or Internal("WORKER_ERROR", "The worker ended this request by an error.", "See the worker's log.")
        if error.code == PAGES_LOST:
            if not finished:
                lifecycle.pages_lost(request, now, fence)
        elif late:
            lifecycle.late_error(request, error, now, fence)
        elif not finished:
            lifecycle.fail(request, error, now, fence)


def _take_error(errors: list[tuple[int, QuireError]], slot: int) -> QuireError | None:
    """Remove and return the first of the slot's errors; None if it has none."""
    for index, (of, error) in enumerate(errors):
        if of == slot:
            del errors[index]
            return error
    return None

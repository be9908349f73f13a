"""Reads a Report into the replica: tokens to their requests, finished sequences out, finished moves settled.

The usual step - every row one token of the slot's present holder - is array work plus one list append per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Finish
from quire_common.errors import Internal, QuireError
from quire_scheduler.outputs import FINISH_REASONS, FinishReason, Rows
from quire_scheduler.page_allocator import Fence
from quire_scheduler.request import Request, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_common.credit import Report
    from quire_scheduler.lifecycle import Lifecycle
    from quire_scheduler.replica import Replica

PAGES_LOST = "PAGES_LOST"


class Harvest:
    """One Report at a time, of the replica's epoch."""

    def __init__(self, replica: Replica, lifecycle: Lifecycle) -> None:
        self._replica = replica
        self._lifecycle = lifecycle
        self._completed = -1

    def read(self, report: Report, now: float) -> None:
        """Apply the Report. Late rows go by the Grant that was applied at their step, so stops retire last."""
        replica = self._replica
        if report.steps:
            self._completed = max(self._completed, report.first_step + report.steps - 1)
        fence = Fence(step=self._completed + report.in_flight)
        self._moves(report)
        self._prefill(report)
        if len(report.slot):
            self._rows(report, fence, now)
        elif report.error:
            self._errors(report, dict(report.error), fence, now)
        self._lifecycle.retired(replica.slots.retire(report.retired))
        replica.pools.advance(report.retired, self._completed)
        stats, prefill = replica.stats, int(report.step_prefill_tokens.sum())
        stats.steps += report.steps
        stats.generation_tokens += len(report.token)
        stats.prefill_tokens += prefill
        if report.steps:
            replica.rates.step(now, report.steps, len(report.token), prefill)
        if not replica.slots.num_active:
            replica.rates.idle()

    def _moves(self, report: Report) -> None:
        count = len(report.moved_id)
        if not count:
            return
        took = report.moved_us.tolist() if len(report.moved_us) == count else [0] * count
        columns = (report.moved_id.tolist(), report.moved_status.tolist(), report.moved_pages.tolist(), took)
        for move_id, status, pages, us in zip(*columns, strict=True):
            self._replica.kv.moved(move_id, bool(status), pages, us)

    def _prefill(self, report: Report) -> None:
        if len(report.prefill_slot):
            inside = (report.prefill_slot >= 0) & (report.prefill_slot < self._replica.slots.num_slots)
            self._replica.slots.computed[report.prefill_slot[inside]] = report.prefill_position[inside]

    def _rows(self, report: Report, fence: Fence, now: float) -> None:
        slots = self._replica.slots
        slot, count = report.slot, report.count
        if int(slot.min()) < 0 or int(slot.max()) >= slots.num_slots:
            raise Internal("BAD_SLOT", "The worker reported a slot that it does not have.", "See the worker's log.")
        applied = np.repeat(report.step_applied, report.step_rows)
        present = slots.active[slot] & (slots.start_seq[slot] <= applied)
        if report.steps == 1 and present.all() and int(count.max()) == 1 == int(count.min()):
            self._append_step(slot, report.token)
            requests: list[Request | None] | None = None
        else:
            requests = [slots.held_at(s, a) for s, a in zip(slot.tolist(), applied.tolist(), strict=True)]
            self._append_rows(requests, slot, count, report.token)
        rows = Rows(
            slots.session[slot], slots.handle[slot], count, report.token, FINISH_REASONS[report.finish], report.logprobs
        )
        drop = self._own(rows, requests)
        first = slots.prefilling[slot] & (count > 0) & present
        if first.any():
            self._first_tokens(slot[first].tolist(), now)
        if report.finish.any():
            self._finishes(report, rows, requests, fence, drop, now)
        elif report.error:
            self._errors(report, dict(report.error), fence, now)
        self._replica.outputs.add_rows(rows.select(~drop) if drop.any() else rows)

    def _append_step(self, slot: NDArray[np.int32], token: NDArray[np.int32]) -> None:
        """The usual case."""
        slots = self._replica.slots
        slots.known_len[slot] += 1
        holder = slots.holder
        for s, t in zip(slot.tolist(), token.tolist(), strict=True):
            holder[s].output.append(t)

    def _append_rows(
        self,
        requests: list[Request | None],
        slot: NDArray[np.int32],
        count: NDArray[np.int32],
        token: NDArray[np.int32],
    ) -> None:
        """Rows of several steps, of former holders, or with other than one token."""
        slots, at, tokens = self._replica.slots, 0, token.tolist()
        for request, s, n in zip(requests, slot.tolist(), count.tolist(), strict=True):
            mine, at = tokens[at : at + n], at + n
            if request is None or request.state is State.FINISHED:
                self._replica.stats.late_tokens += n
                continue
            request.output.extend(mine)
            if request.slot == s:
                slots.known_len[s] += n
            else:
                self._replica.stats.late_tokens += n

    def _own(self, rows: Rows, requests: list[Request | None] | None) -> NDArray[np.bool_]:
        """Set session and handle of rows by their requests; returns the rows that are nobody's any more."""
        drop = np.zeros(len(rows.handle), np.bool_)
        if requests is not None:
            for index, request in enumerate(requests):
                if request is None or request.state is State.FINISHED:
                    drop[index] = True
                else:
                    rows.session[index], rows.handle[index] = request.session, request.handle
        return drop

    def _first_tokens(self, first: list[int], now: float) -> None:
        replica = self._replica
        for slot in first:
            request = replica.slots.holder[slot]
            if request is None or not replica.slots.prefilling[slot]:
                continue
            replica.slots.prefilling[slot] = False
            before = int(replica.slots.known_len[slot]) - 1
            request.timing.first_token(now, before - request.cached_tokens, len(request.output))
            self._name_pages(request)
            replica.kv.store(request)

    def _name_pages(self, request: Request) -> None:
        full = len(request.hashes)
        if full:
            tokens = request.sequence.prompt_ids[: full * self._replica.page_size].astype("<i4").tobytes()
            for group, table in enumerate(request.tables):
                self._replica.names.name(group, table[:full], request.hashes, tokens)

    def _finishes(
        self,
        report: Report,
        rows: Rows,
        requests: list[Request | None] | None,
        fence: Fence,
        drop: NDArray[np.bool_],
        now: float,
    ) -> None:
        errors = dict(report.error)
        ends = np.cumsum(report.count)
        for index in np.nonzero(report.finish)[0].tolist():
            slot = int(report.slot[index])
            request = self._replica.slots.holder[slot] if requests is None else requests[index]
            # Said of this row's sequence, whoever it was: by now the slot may be another's, which it must not hit.
            error = errors.pop(slot, None) if report.finish[index] == Finish.ERROR else None
            if request is None or request.state is State.FINISHED:
                drop[index] = True
                continue
            # A late row of a slot that a Grant stopped: the slot is settled, the request may still end by it.
            reason = FinishReason(int(rows.finish[index]))
            if reason is FinishReason.ERROR:
                drop[index] = True
                self._error(request, error, fence, now)
                continue
            has_token = reason is FinishReason.STOP and report.count[index]
            stop_token = int(report.token[ends[index] - 1]) if has_token else -1
            self._lifecycle.finish(request, reason, now, fence, stop_token)
        self._errors(report, errors, fence, now)

    def _errors(self, report: Report, errors: dict[int, QuireError], fence: Fence, now: float) -> None:
        """Errors of slots without a row, a refused start for one: whoever held the slot when the Report was made."""
        slots = self._replica.slots
        for slot, error in errors.items():
            if not 0 <= slot < slots.num_slots:
                continue
            request = slots.held_at(slot, report.retired) or slots.holder[slot]
            if request is not None and request.state is not State.FINISHED:
                self._error(request, error, fence, now)

    def _error(self, request: Request, error: QuireError | None, fence: Fence, now: float) -> None:
        if error is not None and error.code == PAGES_LOST:
            self._lifecycle.pages_lost(request, now, fence)
            return
        unknown = Internal("WORKER_ERROR", "The worker ended this request by an error.", "See the worker's log.")
        self._lifecycle.fail(request, error or unknown, now, fence)

"""Lifecycle: the ways in which a request leaves its slot or the replica: it finishes, fails, is aborted or is
preempted. All of them are in this module, so that slot, pages, leases and the note to the session are settled once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import Internal
from quire_common.finish import FinishReason
from quire_scheduler.core.outputs import FailedNote, FinishedNote, PrefilledNote
from quire_scheduler.core.request import State
from quire_scheduler.kv.page_allocator import Fence

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.errors import QuireError
    from quire_scheduler.core.replica import Replica
    from quire_scheduler.core.request import Request

    # Called with each request that has left, the reason in words, and the error's code or an empty string.
    Ended = Callable[[Request, str, str], None]

# The worker's error code for a slot whose pages do not have, or will not get, the content that they should.
PAGES_LOST = "PAGES_LOST"
# Error codes of a step that raised. Such a step has only read the pages that earlier steps completed, so these are not
# damaged.
_RAISED = frozenset({"STEP_FAILED", "GPU_OUT_OF_MEMORY", "LOGITS_PROCESSOR_FAILED"})
_MOST_PAGES_LOST = 3
_MOST_AMBIGUOUS_ERRORS = 3


class Lifecycle:
    """Ends or preempts requests. Where a method takes a `fence`, the worker has ended the slot by itself; without a
    fence, the next Grant stops the slot. A fence says which Grant or step must be over before the pages are used again.
    A page's name is its block hash, by which the prefix cache finds it."""

    def __init__(self, replica: Replica, ended: Ended | None = None) -> None:
        self._replica = replica
        self._ended = ended

    def finish(self, request: Request, reason: FinishReason, now: float, fence: Fence, stop_token: int = -1) -> None:
        """End a request whose sequence the worker has finished, free its slot and pages, and give its session a
        finished note. If it has an open transfer, the transfer ends unless a client asked for a lease. The caller adds
        the row with the finish reason. `stop_token`: the stop token that ended the sequence, or -1."""
        self._replica.transfers.finished(request, now)
        self._leave(request, now, fence)
        self._replica.outputs.finished(request.session, self._note(request, now, stop_token))
        self._count(request, reason.name.lower())

    def prefilled(self, request: Request, now: float) -> None:
        """End a prefill-only request that has sampled its token, and give its session a prefilled note. Its pages stay
        for the engine that pulls them, and their lease begins. If the request had lost its slot, the session gets the
        same note and the request ends all the same, but its transfer fails and no lease begins."""
        if request.state is State.STARTED:
            self._replica.transfers.prefilled(request, now)
        self._leave(request, now, None)
        request.timing.finished(now)
        self._replica.outputs.prefilled(request.session, PrefilledNote(request.handle, request.timing.hops()))
        self._count(request, "prefilled")

    def abort(self, request: Request, now: float) -> None:
        """End a request that its session no longer wants. The session gets a finished note and a row with reason
        ABORT."""
        self._leave(request, now, None)
        self._replica.outputs.aborted(request.session, self._note(request, now, -1))
        self._count(request, "abort")

    def fail(self, request: Request, error: QuireError, now: float, fence: Fence | None = None) -> None:
        """End a request by an error, and tell its session. `fence` is given if the worker raised the error and ended
        the slot by itself. In that case, pages that the error may have damaged are not kept."""
        suspect = None if fence is None else self._first_suspect_page(request, error)
        self._leave(request, now, fence, suspect)
        request.timing.finished(now)
        self._replica.outputs.failed(request.session, FailedNote(request.handle, error))
        self._count(request, "error", error.code)

    def late_error(self, request: Request, error: QuireError, now: float, fence: Fence) -> None:
        """Handle the error of a step that was launched before the request left its slot. The request no longer holds
        its pages. So pages that the error may have damaged are found by content: device pages lose their names, and the
        kvstore's copies are quarantined. The request fails if it has not ended."""
        suspect = self._first_suspect_page(request, error)
        if suspect is not None:
            self._replica.cache.drop_suspect_content(request, suspect)
            self._replica.kv.offload.quarantine(request.hashes[suspect:])
        if request.state is not State.FINISHED:
            self.fail(request, error, now, fence)

    def preempt(
        self, request: Request, now: float, *, spare: bool = False, swaps: bool = False, stores: bool = True
    ) -> None:
        """Take the slot and pages of a started request, have the next Grant stop it, and suspend its transfer. The
        request is READY again once the worker has retired the stop, so that no late token can come. `spare`: the
        request was started ahead of need and has hardly begun; this counts as a reclaim, not as a preemption. `swaps`:
        its pages may be stored now and loaded when it resumes, if that is quicker than computing them. Without
        `stores`, none of its pages are stored now."""
        self._replica.transfers.suspend_transfer(request)
        swapped = self._stop_request(request, swaps=swaps, stores=stores)
        request.preempt(now, counts=not spare)
        if spare:
            self._replica.stats.reclaimed()
        else:
            self._replica.stats.preempted(swapped=swapped)

    def pages_lost(self, request: Request, now: float, fence: Fence) -> None:
        """Handle a slot that the worker ended because it lost the slot's pages. The fourth such loss fails the request
        with Internal, also if it has left the slot already. Otherwise, a STARTED request leaves the slot and is READY
        again at once. The exports of its pages to another engine are cancelled until it starts again, the prefix cache
        forgets the pages, and the kvstore's copies are quarantined. For a request that has left its slot already, the
        loss is only counted. If the request waited for pages that another request was to fill, the loss does not count
        against it and no page is suspect."""
        awaited = self._replica.cache.awaits(request)
        self._replica.stats.lost_pages()
        if not awaited and request.count_lost_pages() > _MOST_PAGES_LOST:
            error = Internal(PAGES_LOST, "The worker keeps losing this request's pages.", "See the worker's log.")
            self.fail(request, error, now, fence)
            return
        if request.state is State.STARTED:
            self._replica.transfers.suspend_transfer(request)
            self._free_ended_slot(request, fence, None if awaited else 0)
            request.preempt(now, counts=False)
            self._replica.waiting.make_ready(request)

    def ambiguous_error(self, request: Request, error: QuireError, now: float) -> None:
        """Handle an error that either refuses this request's start or belongs to the slot's former sequence; the worker
        does not say which. The request is preempted and tried again. The fourth such error fails it, where PAGES_LOST
        errors are not counted."""
        # A request that waits for pages of another loses them through no fault of its own.
        if error.code != PAGES_LOST and request.count_ambiguous_error() > _MOST_AMBIGUOUS_ERRORS:
            self.fail(request, error, now)
        else:
            self.preempt(request, now)

    def retired(self, requests: list[Request]) -> None:
        """Handle requests whose stop the worker has retired, so that no step of them can be reported any more.
        Preempted requests are READY again, and the cache drops its records of finished ones."""
        for request in requests:
            if request.state is State.PREEMPTED:
                self._replica.waiting.make_ready(request)
            elif request.state is State.FINISHED:
                self._replica.cache.forget(request)

    def _leave(self, request: Request, now: float, fence: Fence | None, suspect: int | None = None) -> None:
        """Remove the request from its slot or queue, set it to FINISHED, and drop all records of it. Its transfer
        fails, unless the request was prefilled or finished before. With a `fence`, the worker has ended the slot by
        itself, and the pages from index `suspect` on may be wrong. Without one, the next Grant stops the slot. The
        cache's record is kept while late steps may be reported. The session is not told here."""
        replica, late_steps = self._replica, request.state is State.PREEMPTED
        match request.state:
            case State.STARTED:
                if fence is None:
                    self._stop_request(request)
                    late_steps = True
                else:
                    self._free_ended_slot(request, fence, suspect)
                request.timing.stopped(now, len(request.output))
                request.move_to(State.FINISHED)
                replica.rates.finish(request.timing.slot_s)
            case State.PREEMPTED:
                request.move_to(State.FINISHED)
            case _:
                replica.pulls.abandon_pull(request)
                replica.waiting.discard(request)
        replica.kv.forget(request)
        replica.pulls.forget(request)
        replica.transfers.abandon_transfer(request)
        replica.handovers.forget(request)
        if not late_steps:
            replica.cache.forget(request)
        del replica.requests[request.session, request.handle]

    def _count(self, request: Request, reason: str, code: str = "") -> None:
        """Count an ended request by reason, and call `ended`, if given, with the reason and the error's code (empty: no
        error)."""
        self._replica.stats.ended(reason)
        if self._ended is not None:
            self._ended(request, reason, code)

    def _stop_request(self, request: Request, *, swaps: bool = False, stores: bool = True) -> bool:
        """Have the next Grant stop a started request, and take its slot and pages, which may be reused when that Grant
        has retired. The prefix cache names the full pages that were computed, so other requests may find them. Without
        `stores`, or before the first token of the run, none of its pages are stored now. Returns whether the pages were
        swapped, which `swaps` permits: stored now, and loaded when the request resumes."""
        replica, slot = self._replica, request.slot
        computed = replica.slots.ready_len(slot)
        # Before the request has sampled a token, nobody knows whether its pages are sound.
        stores = stores and not bool(replica.slots.prefilling[slot])
        replica.stop_slot(slot)
        replica.slots.stop(slot, replica.next_seq)
        replica.cache.leave(request, computed)
        swapped = swaps and stores and replica.kv.swap_pages(request)
        if not swapped:
            replica.kv.offload.handle_leave(request, stores=stores)
        replica.pools.take_back(request, Fence(grant=replica.next_seq))
        return swapped

    def _free_ended_slot(self, request: Request, fence: Fence, suspect: int | None) -> None:
        """Free the slot of a request that the worker has ended. Its pages may be reused after `fence`. Pages from index
        `suspect` on may have wrong content: they lose their names, and the kvstore's copies are quarantined. None: all
        pages are sound, and full ones are named. They are offered to the kvstore too, if the run has sampled a
        token."""
        replica, computed = self._replica, self._replica.slots.ready_len(request.slot)
        drawn = not bool(replica.slots.prefilling[request.slot])
        replica.slots.finish(request.slot)
        if suspect is None:
            replica.cache.leave(request, computed)
            replica.kv.offload.handle_leave(request, stores=drawn)
        else:
            replica.cache.leave(request, min(computed, suspect * replica.page_size))
            replica.cache.drop_suspect_pages(request, suspect)
            replica.kv.offload.quarantine(request.hashes[suspect:])
        replica.pools.take_back(request, fence)

    def _first_suspect_page(self, request: Request, error: QuireError) -> int | None:
        """Return the index of the first page of the request that the worker's error may have damaged; None: no page. An
        error that is not Internal, such as a client's mistake, damages no page. A step that raised may have damaged
        only the pages that it was about to write. After any other error, such as logits that are not numbers, all pages
        are suspect."""
        if not isinstance(error, Internal):
            return None
        if error.code not in _RAISED:
            return 0
        started = request.state is State.STARTED
        ready = self._replica.slots.ready_len(request.slot) // self._replica.page_size if started else 0
        return max(self._replica.cache.ready_pages(request), ready)

    def _note(self, request: Request, now: float, stop_token: int) -> FinishedNote:
        """Record the time of the request's end, and return the finished note for its session: token counts, the stop
        token (or -1) and the times by phase."""
        request.timing.finished(now)
        return FinishedNote(
            request.handle,
            request.prompt_len,
            len(request.output),
            request.saved_tokens,
            stop_token,
            request.timing.hops(),
        )

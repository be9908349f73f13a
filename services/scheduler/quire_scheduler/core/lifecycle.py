"""How requests leave their slots and this replica: by finishing, failing, abort or preemption. Every path ends here,
so that slot, pages, leases and notes are settled once.
"""

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

    # Told of each request that has left, with the reason in words and the error's code, if any.
    Ended = Callable[[Request, str, str], None]

# The worker's word for a slot whose pages are not, or will not be, what they should.
PAGES_LOST = "PAGES_LOST"
# Errors of a step that raised: pages that earlier steps completed were only read, and did no harm.
_RAISED = frozenset({"STEP_FAILED", "GPU_OUT_OF_MEMORY", "LOGITS_PROCESSOR_FAILED"})
_MOST_PAGES_LOST = 3
_MOST_DOUBTS = 3


class Lifecycle:
    """The exits. A `fence` tells that the worker ended the slot by itself; without one the next Grant stops it."""

    def __init__(self, replica: Replica, ended: Ended | None = None) -> None:
        self._replica = replica
        self._ended = ended

    def finish(self, request: Request, reason: FinishReason, now: float, fence: Fence, stop_token: int = -1) -> None:
        """End a request whose sequence the worker finished, and tell its session. The caller adds the row with the
        finish reason."""
        self._replica.transfers.finished(request, now)
        self._leave(request, now, fence)
        self._replica.outputs.finished(request.session, self._note(request, now, stop_token))
        self._count(request, reason.name.lower())

    def prefilled(self, request: Request, now: float) -> None:
        """End a request that was to be prefilled alone and has drawn its token, and tell its session. Its pages stay
        for the one who pulls them, unless it had lost its slot by then."""
        if request.state is State.STARTED:
            self._replica.transfers.prefilled(request, now)
        self._leave(request, now, None)
        request.timing.finished(now)
        self._replica.outputs.prefilled(request.session, PrefilledNote(request.handle, request.timing.hops()))
        self._count(request, "prefilled")

    def abort(self, request: Request, now: float) -> None:
        """End a request that its session no longer wants; the session gets a row with reason ABORT."""
        self._leave(request, now, None)
        self._replica.outputs.aborted(request.session, self._note(request, now, -1))
        self._count(request, "abort")

    def fail(self, request: Request, error: QuireError, now: float, fence: Fence | None = None) -> None:
        """End a request by an error, and tell its session. `fence` is given where the worker raised the error and ended
        the slot by itself: then pages that the error casts doubt on are not kept."""
        suspect = None if fence is None else self._first_suspect_page(request, error)
        self._leave(request, now, fence, suspect)
        request.timing.finished(now)
        self._replica.outputs.failed(request.session, FailedNote(request.handle, error))
        self._count(request, "error", error.code)

    def late_error(self, request: Request, error: QuireError, now: float, fence: Fence) -> None:
        """Handle an error of a step that was launched before the request left its slot. Its pages have been given up,
        so the caches forget by content those that the error casts doubt on. The request fails if it has not ended."""
        suspect = self._first_suspect_page(request, error)
        if suspect is not None:
            self._replica.cache.distrust_content(request, suspect)
            self._replica.kv.offload.distrust(request.hashes[suspect:])
        if request.state is not State.FINISHED:
            self.fail(request, error, now, fence)

    def preempt(
        self, request: Request, now: float, *, spare: bool = False, swaps: bool = False, stores: bool = True
    ) -> None:
        """Take the request's slot and pages; it is READY again once the stop has retired and no late token can come.
        `spare`: it was started ahead and has hardly begun. `swaps`: its pages may be stored, to be loaded when it
        resumes, if that is quicker than computing. Without `stores` none of its pages are stored now."""
        self._replica.transfers.suspend_transfer(request)
        swapped = self._stop_request(request, swaps=swaps, stores=stores)
        request.preempt(now, counts=not spare)
        if spare:
            self._replica.stats.reclaimed()
        else:
            self._replica.stats.preempted(swapped=swapped)

    def pages_lost(self, request: Request, now: float, fence: Fence) -> None:
        """Handle that the worker lost the slot's pages and ended it: the request is READY again, or fails after too
        many times. Where it waited for pages that another request was to fill, nothing is counted and no page is
        suspect."""
        awaited = self._replica.cache.awaits(request)
        self._replica.stats.lost_pages()
        if not awaited and request.count_lost_pages() > _MOST_PAGES_LOST:
            error = Internal(PAGES_LOST, "The worker keeps losing this request's pages.", "See the worker's log.")
            self.fail(request, error, now, fence)
            return
        if request.state is State.STARTED:
            self._replica.transfers.suspend_transfer(request)
            self._vacated(request, fence, None if awaited else 0)
            request.preempt(now, counts=False)
            self._replica.waiting.make_ready(request)

    def in_doubt(self, request: Request, error: QuireError, now: float) -> None:
        """Handle an error that is either this request's refused start or of the slot's former sequence: the worker does
        not say which. The request is preempted and tried again, or fails after too many such errors."""
        # Pages are lost by those who wait for others' pages, through nobody's fault.
        if error.code != PAGES_LOST and request.count_doubt() > _MOST_DOUBTS:
            self.fail(request, error, now)
        else:
            self.preempt(request, now)

    def retired(self, requests: list[Request]) -> None:
        """Handle requests whose stop the worker has retired, so that no late step can come: preempted ones are READY
        again, and the cache forgets those that have finished."""
        for request in requests:
            if request.state is State.PREEMPTED:
                self._replica.waiting.make_ready(request)
            elif request.state is State.FINISHED:
                self._replica.cache.forget(request)

    def _leave(self, request: Request, now: float, fence: Fence | None, suspect: int | None = None) -> None:
        """Remove the request from its slot or queue and from all that was kept for it. With a `fence` the worker has
        ended the slot by itself, and pages from `suspect` on may be wrong; without one the next Grant stops the
        slot."""
        replica, late_steps = self._replica, request.state is State.PREEMPTED
        match request.state:
            case State.STARTED:
                if fence is None:
                    self._stop_request(request)
                    late_steps = True
                else:
                    self._vacated(request, fence, suspect)
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
        self._replica.stats.ended(reason)
        if self._ended is not None:
            self._ended(request, reason, code)

    def _stop_request(self, request: Request, *, swaps: bool = False, stores: bool = True) -> bool:
        """Stop a started request and take its slot and pages. Without `stores`, none of its pages are stored now.
        Returns whether the pages were swapped, which `swaps` allows: they are stored, to be loaded when the request
        resumes."""
        replica, slot = self._replica, request.slot
        computed = replica.slots.ready_len(slot)
        # Until it has drawn a token, nobody knows whether its pages are sound.
        stores = stores and not bool(replica.slots.prefilling[slot])
        replica.stop_slot(slot)
        replica.slots.stop(slot, replica.next_seq)
        replica.cache.leave(request, computed)
        swapped = swaps and stores and replica.kv.swap_pages(request)
        if not swapped:
            replica.kv.offload.leaves(request, stores=stores)
        replica.pools.take_back(request, Fence(grant=replica.next_seq))
        return swapped

    def _vacated(self, request: Request, fence: Fence, suspect: int | None) -> None:
        """Free the slot of a request that the worker has ended, and its pages after `fence`. Pages from `suspect` on
        may be wrong and are forgotten; None: all are sound."""
        replica, computed = self._replica, self._replica.slots.ready_len(request.slot)
        drawn = not bool(replica.slots.prefilling[request.slot])
        replica.slots.finish(request.slot)
        if suspect is None:
            replica.cache.leave(request, computed)
            replica.kv.offload.leaves(request, stores=drawn)
        else:
            replica.cache.leave(request, min(computed, suspect * replica.page_size))
            replica.cache.distrust(request, suspect)
            replica.kv.offload.distrust(request.hashes[suspect:])
        replica.pools.take_back(request, fence)

    def _first_suspect_page(self, request: Request, error: QuireError) -> int | None:
        """Return the first of the request's pages that the worker's error casts doubt on; None: none. A client's
        mistake damages no page, and a step that raised only those that it was about to write. After other errors, such
        as logits that are not numbers, all are suspect."""
        if not isinstance(error, Internal):
            return None
        if error.code not in _RAISED:
            return 0
        started = request.state is State.STARTED
        ready = self._replica.slots.ready_len(request.slot) // self._replica.page_size if started else 0
        return max(self._replica.cache.ready_pages(request), ready)

    def _note(self, request: Request, now: float, stop_token: int) -> FinishedNote:
        """Stamp the request's end, and return the note of it for the session."""
        request.timing.finished(now)
        return FinishedNote(
            request.handle,
            request.prompt_len,
            len(request.output),
            request.saved_tokens,
            stop_token,
            request.timing.hops(),
        )

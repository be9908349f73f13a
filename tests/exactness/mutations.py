"""Rules of the protocol, broken one at a time: what a harness that is worth its name must notice.

Each mutation replaces one function of the scheduler or of the worker by one that is wrong in one way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire_common.credit import Finish
from quire_common.pages import chain_hashes
from quire_scheduler.batching.slot_table import SlotTable
from quire_scheduler.core import lifecycle, output_processor
from quire_scheduler.core.lifecycle import Lifecycle
from quire_scheduler.core.outputs import OutputBuffer
from quire_scheduler.kv import page_identity, prefix_cache
from quire_scheduler.kv.page_allocator import NO_FENCE, Fence, PageAllocator
from quire_worker.engine.engine import Engine
from quire_worker.engine.resident_slots import ResidentSlots
from quire_worker.engine.slots import SlotTable as WorkerSlots
from quire_worker.engine.step_runner import StepRunner
from quire_worker.engine.stop_rule import finish_codes
from quire_worker.engine.waiting import WaitingSlots
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.thinking_track import ThinkingTrack
from tests.exactness.virtual import virtual_kvstore
from tests.exactness.virtual.virtual_kvstore import StoreWeather
from tests.exactness.virtual.virtual_worker import VirtualWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest import MonkeyPatch

    from quire_common.credit import Start
    from quire_scheduler.core.outputs import Rows
    from quire_scheduler.core.request import Request
    from quire_worker.step import StepBatch

# Steps that write until they end, and a scheduler so near that its Grants come before that.
FENCES_MATTER = {"settle": "late", "grant_us": (0, 0), "report_us": (0, 0), "think_us": 0, "step_us": (4_000, 6_000)}
# Several steps in one Report.
REPORTS_MERGE = {"coalesce": True, "step_us": (600, 700), "think_us": 0}
# Prefixes are looked for on the device.
CACHED = {"prefix_cache": True}
# Prefixes are looked for in the kvstore alone, where every other page rots.
ROTTEN = {"kvstore": True, "prefix_cache": False, "store": StoreWeather(corrupt=0.5)}
# Stores that take long, of pages that are wanted; what was stored is loaded.
SLOW_STORES = {
    "kvstore": True,
    "prefix_cache": False,
    "offload": "write-through",
    "store": StoreWeather(delay_us=40_000, short_leases=0.0),
}
# Loads fail, and what they should have brought is named.
UNLUCKY = {"kvstore": True, "prefix_cache": True, "store": StoreWeather(fail_moves=0.5)}


class Mutation(NamedTuple):
    """How to break a rule, and the weather in which it matters (see hunt.first_wrong)."""

    break_rule: Callable[[MonkeyPatch], None]
    weather: dict[str, Any]
    first: int = 0
    """Scenarios before it were seen to go well: not to look there saves most of a minute for the rarest."""

    @property
    def name(self) -> str:
        """Of the function that breaks the rule."""
        return self.break_rule.__name__


def no_fence_for_stopped_slots(patch: MonkeyPatch) -> None:
    """Pages of a stopped slot are free at once."""
    patch.setattr(lifecycle, "Fence", lambda grant: NO_FENCE)


def step_fence_off_by_the_depth(patch: MonkeyPatch) -> None:
    """Pages of a sequence that ended are free though the next step, which runs already, writes to them."""
    patch.setattr(output_processor, "Fence", lambda step: Fence(step=step - 1))


def attribution_by_report_time(patch: MonkeyPatch) -> None:
    """A token is taken for that of whoever holds the slot when the Report comes."""
    take = SlotTable.take_slot

    def taken(self: SlotTable, *args: Any) -> int:
        slot = take(self, *args)
        self.start_seq[slot] = 0
        return slot

    patch.setattr(SlotTable, "take_slot", taken)


def requeued_before_the_stop_retired(patch: MonkeyPatch) -> None:
    """A preempted request waits for its next start while its last tokens are still under way."""
    preempt = Lifecycle.preempt

    def preempted(self: Lifecycle, request: Request, *args: Any, **options: Any) -> None:
        preempt(self, request, *args, **options)
        self._replica.waiting.make_ready(request)

    patch.setattr(Lifecycle, "preempt", preempted)


def late_tokens_not_told(patch: MonkeyPatch) -> None:
    """Tokens that come after the stop are kept for the next start, and not told to the session."""
    late: set[tuple[int, int]] = set()
    held_at, add_rows = SlotTable.held_at, OutputBuffer.add_rows

    def held(self: SlotTable, slot: int, applied: int) -> Request | None:
        request = held_at(self, slot, applied)
        if request is not None and request.slot != slot:
            late.add((request.session, request.handle))
        return request

    def add(self: OutputBuffer, rows: Rows) -> None:
        keys = zip(rows.session.tolist(), rows.handle.tolist(), strict=True)
        add_rows(self, rows.select(np.array([key not in late for key in keys], np.bool_)))
        late.clear()

    patch.setattr(SlotTable, "held_at", held)
    patch.setattr(OutputBuffer, "add_rows", add)


def late_tokens_dropped(patch: MonkeyPatch) -> None:
    """Tokens that come after the stop are forgotten. This one is no rule of exactness: they are computed again."""
    held_at = SlotTable.held_at

    def held(self: SlotTable, slot: int, applied: int) -> Request | None:
        request = held_at(self, slot, applied)
        return request if request is not None and request.slot == slot else None

    patch.setattr(SlotTable, "held_at", held)


def retired_when_applied(patch: MonkeyPatch) -> None:
    """The worker acknowledges a Grant though earlier steps still run."""
    patch.setattr(Engine, "_retired", lambda self: self._applied)


def watermarks_ignored(patch: MonkeyPatch) -> None:
    """A slot runs before its cached range is there."""

    def judged(self: WaitingSlots, slot: int) -> None:
        self._table.run(slot)
        self._states.running[self._table.pages(slot)] += 1
        self.discard(slot)

    patch.setattr(WaitingSlots, "check_slot", judged)


def fed_from_another_slot(patch: MonkeyPatch) -> None:
    """A decode row gets the token that its neighbour drew."""
    feed = StepRunner._feed

    def fed(self: StepRunner, batch: StepBatch) -> None:
        feed(self, batch)
        rows = np.flatnonzero(batch.fed)
        first = (np.cumsum(batch.count) - batch.count)[rows]
        batch.token[first] = np.roll(batch.token[first], 1)

    patch.setattr(StepRunner, "_feed", fed)


def stops_missed_in_flight(patch: MonkeyPatch) -> None:
    """Stop ids are looked for only in rows whose token did not come from the step before."""

    def missed(batch: StepBatch, token: Any, nth: int = 0) -> Any:
        finish = finish_codes(batch, token, nth)
        finish[batch.fed & (finish == Finish.STOP)] = Finish.NONE
        return finish

    patch.setattr("quire_worker.engine.stop_rule.finish_codes", missed)


def rows_after_the_end_told(patch: MonkeyPatch) -> None:
    """A sequence ended, and the row that was launched before anyone knew is told too."""
    patch.setattr(ResidentSlots, "are_late", lambda self, slot_generation: np.ones(len(slot_generation), np.bool_))
    patch.setattr(ResidentSlots, "late_end", lambda self, slot_generation: None)


def late_rows_taken_for_the_newcomers(patch: MonkeyPatch) -> None:
    """The worker does not see that a slot has another holder than when the step was launched."""
    fill = WorkerSlots.fill

    def filled(self: WorkerSlots, start: Start, *args: Any) -> None:
        fill(self, start, *args)
        self.slot_generation[start.slot] = 0

    patch.setattr(WorkerSlots, "fill", filled)


def credit_past_the_pages(patch: MonkeyPatch) -> None:
    """A slot runs on without pages."""
    patch.setattr(WorkerSlots, "ceiling", lambda self: self.bound)


def the_last_page_shared(patch: MonkeyPatch) -> None:
    """A sequence is started on its last token's page too, into which it will write."""
    patch.setattr(prefix_cache, "most_hits", lambda request, size: len(request.hashes))


def names_without_a_past(patch: MonkeyPatch) -> None:
    """A page's name says nothing of what came before it."""

    def alone(ids: Any, size: int, *_: Any) -> list[bytes]:
        return [chain_hashes(ids[at : at + size], size)[0] for at in range(0, len(ids) - size + 1, size)]

    patch.setattr(page_identity, "chain_hashes", alone)


def unguarded(break_rule: Callable[[MonkeyPatch], None]) -> Callable[[MonkeyPatch], None]:
    """The same where neither the worker nor the harness looks whether granted pages are free: the tokens must tell."""

    def both(patch: MonkeyPatch) -> None:
        break_rule(patch)
        patch.setattr(ResidentSlots, "_check_free", lambda self, own, fresh: None)
        patch.setattr(ResidentSlots, "can_load", lambda self, pages: True)
        patch.setattr(VirtualWorker, "_check_fences", lambda self, new: None)

    both.__name__ = f"{break_rule.__name__}_unguarded"
    return both


def rot_goes_unnoticed(patch: MonkeyPatch) -> None:
    """The kvstore hands pages out without a look at their checksums."""
    patch.setattr(virtual_kvstore, "crc32", lambda body: 0)


def pages_reused_while_stored(patch: MonkeyPatch) -> None:
    """What a store still reads is given to the next."""
    patch.setattr(PageAllocator, "lend", lambda self, pages: None)
    patch.setattr(PageAllocator, "take_back", lambda self, pages: None)
    patch.setattr(PageAllocator, "check_integrity", lambda self, *more: None)


def fed_tokens_not_counted(patch: MonkeyPatch) -> None:
    """Penalties know the tokens of a start, and none that was drawn since."""
    patch.setattr(LogitsState, "fed", lambda self, token: None)


def thinking_begins_anew(patch: MonkeyPatch) -> None:
    """A sequence that starts again has its whole budget of thinking again."""
    make = ThinkingTrack.__init__

    def made(self: ThinkingTrack, budget: Any, prompt_ids: Any, output: Any) -> None:
        make(self, budget, prompt_ids, ())

    patch.setattr(ThinkingTrack, "__init__", made)


MUTATIONS = (
    Mutation(no_fence_for_stopped_slots, {}),
    Mutation(step_fence_off_by_the_depth, {}),
    Mutation(retired_when_applied, {}, first=15),
    Mutation(unguarded(no_fence_for_stopped_slots), FENCES_MATTER, first=50),
    Mutation(unguarded(step_fence_off_by_the_depth), FENCES_MATTER),
    Mutation(unguarded(retired_when_applied), FENCES_MATTER, first=25),
    Mutation(attribution_by_report_time, {}),
    Mutation(requeued_before_the_stop_retired, {}, first=480),
    Mutation(late_tokens_not_told, {}),
    Mutation(watermarks_ignored, {}),
    Mutation(fed_from_another_slot, {}),
    Mutation(stops_missed_in_flight, {}),
    Mutation(rows_after_the_end_told, REPORTS_MERGE),
    Mutation(late_rows_taken_for_the_newcomers, {}),
    Mutation(credit_past_the_pages, {}),
    Mutation(fed_tokens_not_counted, {}),
    Mutation(thinking_begins_anew, {}),
    Mutation(rot_goes_unnoticed, ROTTEN),
    Mutation(pages_reused_while_stored, SLOW_STORES),
    Mutation(the_last_page_shared, CACHED),
    Mutation(names_without_a_past, CACHED, first=80),
)

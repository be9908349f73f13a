"""Settling a step: what was computed raises watermarks, sequences that ended leave, and the Report's rows are written.

By the time a step ends, a sequence of it may have left its slot. Stopped by a Grant: its row is reported all the same,
since the step was launched before (`late`). Ended by itself in the step before: nobody may see the row (`void`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Finish, PromptLogprobs
from quire_worker.engine.report_draft import StepRows

if TYPE_CHECKING:
    from quire_worker.arrays import Bool, Int32
    from quire_worker.engine.in_flight_step import InFlightStep
    from quire_worker.engine.ports import StepOutcome
    from quire_worker.engine.resident_slots import ResidentSlots

_NOBODY = np.empty(0, np.int32)


def complete_step(residents: ResidentSlots, in_flight: InFlightStep, outcome: StepOutcome) -> StepRows:
    """Update the slots with an ended step: raise page watermarks, count tokens, and end sequences that are finished or
    failed. Returns the rows to report; those of sequences that had ended before are left out."""
    residents.settle(in_flight.step)
    table, slots = residents.table, in_flight.slot
    live = table.slot_generation[slots] == in_flight.slot_generation
    end = in_flight.position + in_flight.count
    everyone = bool(live.all())
    if everyone and in_flight.decodes == len(slots) and not outcome.finish.any():
        return _complete_decodes(residents, in_flight, end, outcome)
    told = live if everyone else live | residents.are_late(in_flight.slot_generation)
    sampled = told & (outcome.token >= 0)
    _advance(residents, in_flight, live, end, outcome)
    ended = np.flatnonzero(told & (outcome.finish > 0))
    tokenless = ended[outcome.token[ended] < 0]
    progress = live.copy()
    progress[: in_flight.decodes] = False
    progress[list(outcome.failed)] = False
    rows = StepRows(
        slot=np.concatenate([slots[sampled], slots[tokenless]]),
        token=outcome.token[sampled],
        finish=np.concatenate([outcome.finish[sampled], outcome.finish[tokenless]]),
        prefill_slot=slots[progress],
        prefill_position=end[progress],
        prefill_tokens=int(in_flight.count[in_flight.decodes :].sum()),
        logprobs=None if outcome.logprobs is None else outcome.logprobs.select(sampled),
        scores=[
            PromptLogprobs(int(slots[row]), int(in_flight.position[row]) + 1, columns)
            for row, columns in outcome.scores.items()
            if progress[row]
        ],
    )
    for sequence in ended.tolist():
        if sequence in outcome.failed:
            rows.errors.append((int(slots[sequence]), outcome.failed[sequence]))
        if live[sequence]:
            residents.end(int(slots[sequence]), Finish(outcome.finish[sequence]))
        else:
            residents.late_end(int(in_flight.slot_generation[sequence]))
    residents.forget_late()
    return rows


def _complete_decodes(residents: ResidentSlots, in_flight: InFlightStep, end: Int32, outcome: StepOutcome) -> StepRows:
    """Do what `complete_step` does, in fewer operations, for a step in which every sequence decodes, still holds its
    slot, and goes on."""
    slots = in_flight.slot
    residents.computed_to(slots, in_flight.position, end, len(slots))
    residents.table.known_len[slots] = end + 1
    residents.forget_late()
    return StepRows(
        slot=slots,
        token=outcome.token,
        finish=outcome.finish,
        prefill_slot=_NOBODY,
        prefill_position=_NOBODY,
        prefill_tokens=0,
        logprobs=None if outcome.logprobs is None else outcome.logprobs.select(in_flight.sample),
    )


def _advance(residents: ResidentSlots, in_flight: InFlightStep, live: Bool, end: Int32, outcome: StepOutcome) -> None:
    """Raise the page watermarks, and set known lengths and first-token times, of sequences that still hold their slot
    and did not fail."""
    table = residents.table
    ran = live
    if outcome.failed:
        ran = live.copy()
        ran[list(outcome.failed)] = False
    decodes = int(np.count_nonzero(ran[: in_flight.decodes]))
    residents.computed_to(in_flight.slot[ran], in_flight.position[ran], end[ran], decodes)
    sampled = ran & in_flight.sample
    table.known_len[in_flight.slot[sampled]] = end[sampled] + 1
    first = in_flight.slot[in_flight.decodes :][sampled[in_flight.decodes :]]
    if len(first):
        table.first_token_ns[first] = time.time_ns()

"""Completion of a step: raises page watermarks, ends finished sequences, and writes the Report's rows.

By the time a step ends, one of its sequences may have left its slot. If a Grant stopped the sequence, its row is still
reported, since the step was launched before (a `late` row). If the sequence ended by itself in the step before, its row
is not reported (a `void` row).
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

_NO_SLOTS = np.empty(0, np.int32)


def complete_step(residents: ResidentSlots, in_flight: InFlightStep, outcome: StepOutcome) -> StepRows:
    """Update the slots with an ended step: raise page watermarks, count tokens, and end sequences that are finished or
    failed. Returns the rows to report. They include those of sequences that a Grant has stopped since the launch. Rows
    of sequences that had ended by themselves before, or that were held, are left out; the progress of a held prefill is
    still reported. Held slots are kept out of further steps until their masks have come."""
    residents.settle(in_flight.step)
    table, slots = residents.table, in_flight.slot
    live = table.slot_generation[slots] == in_flight.slot_generation
    if outcome.held:
        held = np.array(outcome.held)
        residents.hold(slots[held[live[held]]])
    everyone = bool(live.all())
    if (
        everyone
        and in_flight.decodes == len(slots)
        and not outcome.finish.any()
        and _one_token_each(residents, outcome)
    ):
        return _complete_plain_decodes(residents, in_flight, outcome)
    told = live if everyone else live | residents.are_late(in_flight.slot_generation)
    kept = outcome.token >= 0
    num_kept = np.count_nonzero(kept, axis=1).astype(np.int32)
    if in_flight.has_drafts:
        table.count_unforced_rows(slots[live], num_kept[live])
    end = _advance(residents, in_flight, live, num_kept, outcome)
    sampled = told & (num_kept > 0)
    ended = (told & (outcome.finish > 0)).nonzero()[0]
    tokenless = ended[num_kept[ended] == 0]
    progress = live.copy()
    progress[: in_flight.decodes] = False
    progress[list(outcome.failed)] = False
    kept &= told[:, None]
    rows = StepRows(
        slot=np.concatenate([slots[sampled], slots[tokenless]]),
        count=np.concatenate([num_kept[sampled], num_kept[tokenless]]),
        token=outcome.token[kept],
        finish=np.concatenate([outcome.finish[sampled], outcome.finish[tokenless]]),
        prefill_slot=slots[progress],
        prefill_position=end[progress],
        prefill_tokens=int(in_flight.count[in_flight.decodes :].sum()),
        logprobs=None if outcome.logprobs is None else outcome.logprobs.select(kept.reshape(-1)),
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
            error = outcome.failed.get(sequence)
            residents.end(int(slots[sequence]), Finish(outcome.finish[sequence]), error)
        else:
            residents.late_end(int(in_flight.slot_generation[sequence]))
    residents.forget_late()
    return rows


def _one_token_each(residents: ResidentSlots, outcome: StepOutcome) -> bool:
    """Whether each row sampled exactly one token, and no token may be the first of its sequence. False also while any
    sequence still awaits its first token."""
    if residents.awaiting_first_token:
        return False
    return outcome.one_token_each or (outcome.token.shape[1] == 1 and int(outcome.token.min()) >= 0)


def _complete_plain_decodes(residents: ResidentSlots, in_flight: InFlightStep, outcome: StepOutcome) -> StepRows:
    """Raise each slot's page watermark and known length by one position, and return the rows to report. The result
    equals that of `complete_step`, with fewer operations. Only for a step in which every sequence decodes, still holds
    its slot, samples one token, and goes on. If the step was launched with drafts, the device has left out all of
    them."""
    slots, table, count = in_flight.slot, residents.table, in_flight.count
    if in_flight.has_drafts:
        residents.subtract_uncomputed(slots, count - 1)
        count = np.ones_like(count)
        table.count_unforced_rows(slots, count)
    end = table.known_len[slots]
    residents.computed_one(slots, end)
    table.known_len[slots] = end + 1
    residents.forget_late()
    return StepRows(
        slot=slots,
        count=count,
        token=outcome.token.reshape(-1),
        finish=outcome.finish,
        prefill_slot=_NO_SLOTS,
        prefill_position=_NO_SLOTS,
        prefill_tokens=0,
        logprobs=None if outcome.logprobs is None else outcome.logprobs.select(in_flight.sample),
    )


def _advance(
    residents: ResidentSlots, in_flight: InFlightStep, live: Bool, num_kept: Int32, outcome: StepOutcome
) -> Int32:
    """Raise the page watermarks, and set positions, known lengths and first-token times, of sequences that still hold
    their slot and did not fail. Returns the number of positions of each of these sequences that are computed now; other
    entries mean nothing. Tokens that a sequence does not keep, and the last position of a held row, do not count as
    computed."""
    table, slots, decodes = residents.table, in_flight.slot, in_flight.decodes
    ran = live
    if outcome.failed:
        ran = live.copy()
        ran[list(outcome.failed)] = False
    first = in_flight.position.copy()
    first[:decodes] = table.known_len[slots[:decodes]] - 1
    end = in_flight.position + in_flight.count
    end[:decodes] = first[:decodes] + num_kept[:decodes]
    end[decodes:] -= in_flight.sample[decodes:] & (num_kept[decodes:] == 0)
    residents.computed_to(slots[ran], first[ran], end[ran])
    sampled = ran & in_flight.sample
    lost = in_flight.count - num_kept
    lost[decodes:] = num_kept[decodes:] == 0
    residents.subtract_uncomputed(slots[sampled], lost[sampled])
    table.known_len[slots[sampled]] = end[sampled] + 1
    residents.note_first_tokens(
        slots[sampled & (num_kept > 0)], slots[decodes:][(sampled & (num_kept == 0))[decodes:]], time.time_ns()
    )
    return end

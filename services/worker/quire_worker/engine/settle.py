"""Settling a step: what was computed raises watermarks, sequences that ended leave, and the Report's rows are written.

By the time a step ends, a sequence of it may have left its slot. Stopped by a Grant: its row is reported all the same,
since the step was launched before (`late`). Ended by itself in the step before: nobody may see the row (`void`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Finish, PromptLogprobs
from quire_worker.engine.report_draft import StepRows, as_logprobs, keep_logprobs

if TYPE_CHECKING:
    from quire_worker.engine.flight import Flight
    from quire_worker.engine.residents import Residents
    from quire_worker.engine.step_runner import StepOutcome
    from quire_worker.step import Bool, Int32

_NOBODY = np.empty(0, np.int32)


def settle(residents: Residents, flight: Flight, outcome: StepOutcome) -> StepRows:
    """Bring the slots up to date with a step that has ended."""
    residents.settled = flight.step
    table, slots = residents.table, flight.slot
    live = table.tenure[slots] == flight.tenure
    end = flight.position + flight.count
    everyone = bool(live.all())
    if everyone and flight.decodes == len(slots) and not outcome.finish.any():
        return _usual(residents, flight, end, outcome)
    told = live if everyone else live | residents.are_late(flight.tenure)
    drawn = told & (outcome.token >= 0)
    _advance(residents, flight, live, end, outcome)
    ended = np.flatnonzero(told & (outcome.finish > 0))
    tokenless = ended[outcome.token[ended] < 0]
    progress = live.copy()
    progress[: flight.decodes] = False
    progress[list(outcome.failed)] = False
    rows = StepRows(
        slot=np.concatenate([slots[drawn], slots[tokenless]]),
        token=outcome.token[drawn],
        finish=np.concatenate([outcome.finish[drawn], outcome.finish[tokenless]]),
        prefill_slot=slots[progress],
        prefill_position=end[progress],
        prefill_tokens=int(flight.count[flight.decodes :].sum()),
        logprobs=keep_logprobs(outcome.logprobs, drawn),
        scores=[
            PromptLogprobs(int(slots[row]), int(flight.position[row]) + 1, as_logprobs(columns))
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
            residents.late_end(int(flight.tenure[sequence]))
    residents.forget_late()
    return rows


def _usual(residents: Residents, flight: Flight, end: Int32, outcome: StepOutcome) -> StepRows:
    """Everybody decodes, is still there, and goes on: what the general way comes to, in fewer operations."""
    slots = flight.slot
    residents.computed_to(slots, flight.position, end, len(slots))
    residents.table.known_len[slots] = end + 1
    residents.forget_late()
    return StepRows(
        slot=slots,
        token=outcome.token,
        finish=outcome.finish,
        prefill_slot=_NOBODY,
        prefill_position=_NOBODY,
        prefill_tokens=0,
        logprobs=keep_logprobs(outcome.logprobs, flight.sample),
    )


def _advance(residents: Residents, flight: Flight, live: Bool, end: Int32, outcome: StepOutcome) -> None:
    """Watermarks and known tokens of the sequences that are still there and did not fail."""
    table = residents.table
    ran = live
    if outcome.failed:
        ran = live.copy()
        ran[list(outcome.failed)] = False
    decodes = int(np.count_nonzero(ran[: flight.decodes]))
    residents.computed_to(flight.slot[ran], flight.position[ran], end[ran], decodes)
    drawn = ran & flight.sample
    table.known_len[flight.slot[drawn]] = end[drawn] + 1
    first = flight.slot[flight.decodes :][drawn[flight.decodes :]]
    if len(first):
        table.first_token_ns[first] = time.time_ns()

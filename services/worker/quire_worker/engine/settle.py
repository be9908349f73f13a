"""Settling a step: what was computed and drawn goes into the slots, sequences that end leave, and the Report's rows
are written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Finish
from quire_common.errors import Internal, QuireError
from quire_worker.engine.report_draft import StepRows, keep_logprobs
from quire_worker.engine.stop_rule import finish_codes

if TYPE_CHECKING:
    from quire_worker.engine.batch_rule import Choice
    from quire_worker.engine.residents import Residents
    from quire_worker.engine.step_runner import StepOutcome
    from quire_worker.step import Bool, Int32

_NO_TOKENS = np.empty(0, np.int32)


def settle(residents: Residents, choice: Choice, sample: Bool, outcome: StepOutcome) -> StepRows:
    """Bring the slots up to date with a step. `sample` is the batch's column."""
    table = residents.table
    healthy = np.array(outcome.healthy, np.intp)
    slots, count, sample = choice.slot[healthy], choice.count[healthy], sample[healthy]
    decodes = int(np.count_nonzero(healthy < choice.decodes))
    first = table.computed[slots]
    end = first + count
    residents.computed_to(slots, first, end, decodes)
    table.computed[slots] = end

    output = outcome.output
    tokens = _NO_TOKENS if output is None else output.token
    kept = tokens >= 0
    drawn, drawn_tokens = slots[sample][kept], tokens[kept].astype(np.int32)
    finish = _append(residents, drawn, drawn_tokens)
    prefilled = slots[table.prefill_only[slots] & (end == table.known_len[slots])]
    rows = StepRows(
        slot=drawn,
        token=drawn_tokens,
        finish=finish,
        prefill_slot=slots[decodes:],
        prefill_position=end[decodes:],
        prefill_tokens=int(count[decodes:].sum()),
        logprobs=None if output is None else keep_logprobs(output.logprobs, kept),
    )
    for slot, code in zip(drawn[finish > 0].tolist(), finish[finish > 0].tolist(), strict=True):
        residents.end(slot, Finish(code))
    for slot in prefilled.tolist():
        _end_without_token(residents, rows, slot, Finish.LIMIT)
    for slot in slots[sample][~kept].tolist():
        _fail(residents, rows, slot, _nan_logits())
    for sequence, error in outcome.failed.items():
        _fail(residents, rows, int(choice.slot[sequence]), error)
    return rows


def _append(residents: Residents, slots: Int32, tokens: Int32) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    table = residents.table
    table.token[slots, table.known_len[slots]] = tokens
    table.known_len[slots] += 1
    unseen = slots[table.first_token_ns[slots] == 0]
    if len(unseen):
        table.first_token_ns[unseen] = time.time_ns()
    return finish_codes(table, slots, tokens)


def _fail(residents: Residents, rows: StepRows, slot: int, error: QuireError) -> None:
    rows.errors.append((slot, error))
    _end_without_token(residents, rows, slot, Finish.ERROR)


def _end_without_token(residents: Residents, rows: StepRows, slot: int, finish: Finish) -> None:
    rows.ended_slot.append(slot)
    rows.ended_finish.append(finish)
    residents.end(slot, finish)


def _nan_logits() -> QuireError:
    return Internal(
        "NAN_LOGITS",
        "The model's output for this sequence is not a number: its weights or its KV cache are damaged.",
        "Retry; if it happens again, check the weights.",
    )

"""Runs the sequences of a step that could not be launched one by one, to find those that cause the error.

On a CPU, StepRunner does this if the model raises. A GPU keeps the sequences' state itself, so a step cannot be run
twice there. So each sequence runs once, in a step of its own, and the outcomes are joined into the outcome of the whole
step.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire_common.credit import Finish
from quire_common.credit.logprobs import join_logprobs
from quire_common.errors import Internal
from quire_common.telemetry.logs import get_logger
from quire_worker.cuda.memory import STEP_FIX
from quire_worker.engine.ports import StepOutcome
from quire_worker.engine.step_builder import select_sequences
from quire_worker.engine.step_runner import as_slot_error
from quire_worker.step import DeviceTiming

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit import LogprobColumns
    from quire_common.errors import QuireError
    from quire_worker.step import StepBatch

log = get_logger(__name__)
_NO_TIME = DeviceTiming(0, 0, 0)


def run_isolated(
    batch: StepBatch,
    error: Exception,
    run: Callable[[StepBatch], StepOutcome],
    examine: Callable[[Exception], None],
    *,
    again: bool,
) -> StepOutcome:
    """Run the sequences of a step whose launch raised `error` one by one, each in its own step by `run`, and join their
    outcomes. Sequences that raise again fail. `examine` raises if an error is the device's own. A step of one sequence
    is not run again, but fails. Without `again`, all sequences fail, because tokens may have been fed back already.
    Errors are logged."""
    sequences = range(len(batch.count))
    log.exception("a step could not be launched", sequences=len(sequences), each_alone=again)
    if not again or len(sequences) == 1:
        return _joined([_failed(error) for _ in sequences])
    outcomes = []
    for sequence in sequences:
        try:
            outcomes.append(run(_alone(batch, sequence)))
        except Exception as own:
            examine(own)
            log.exception("a sequence could not be launched", slot=int(batch.slot[sequence]))
            outcomes.append(_failed(own))
    return _joined(outcomes)


def launch_error(error: Exception) -> QuireError:
    """Return the error of a sequence that could not be launched: GPU_OUT_OF_MEMORY if torch ran out of memory, else the
    error of any failed sequence."""
    if isinstance(error, torch.OutOfMemoryError):
        return Internal(
            "GPU_OUT_OF_MEMORY",
            "The GPU had no memory left to run this sequence.",
            f"Retry, or ask for less (logprobs, prompt_logprobs). For the worker: {STEP_FIX}",
        )
    return as_slot_error(error)


def _alone(batch: StepBatch, sequence: int) -> StepBatch:
    """Return the step of only this sequence, with its rows, its controls and the columns that the device reads."""
    kept = [sequence]
    bounds = ("bound", "min_len") if len(batch.bound) else ()
    columns = {name: getattr(batch, name)[kept] for name in ("slot", "fed", "last", "stop_id", *bounds)}
    return dataclasses.replace(select_sequences(batch, kept), **columns)


def _failed(error: Exception) -> StepOutcome:
    """Return the outcome of a step of one sequence that failed with this error: token -1, finish ERROR, no times."""
    finish = np.full(1, Finish.ERROR, np.uint8)
    return StepOutcome(np.full((1, 1), -1, np.int32), finish, {0: launch_error(error)}, None, _NO_TIME, 0)


def _joined(outcomes: list[StepOutcome]) -> StepOutcome:
    """Join the outcomes of steps of one sequence each into the outcome of a whole step, numbered in their order. The
    device's times are summed; `wait_us` is that of the first step."""
    timings = [each.timing for each in outcomes]
    return StepOutcome(
        token=np.concatenate([each.token for each in outcomes]),
        finish=np.concatenate([each.finish for each in outcomes]),
        failed={sequence: each.failed[0] for sequence, each in enumerate(outcomes) if each.failed},
        logprobs=_joined_logprobs({n: each.logprobs for n, each in enumerate(outcomes) if each.logprobs is not None}),
        timing=DeviceTiming(
            *(sum(getattr(each, f.name) for each in timings) for f in dataclasses.fields(DeviceTiming))
        ),
        wait_us=outcomes[0].wait_us,
        scores={sequence: each.scores[0] for sequence, each in enumerate(outcomes) if each.scores},
        held=tuple(sequence for sequence, each in enumerate(outcomes) if each.held),
    )


def _joined_logprobs(columns: dict[int, LogprobColumns]) -> LogprobColumns | None:
    """Join logprobs, which are keyed by sequence and hold one entry each, into the columns of a whole step; None if
    there are none."""
    joined = join_logprobs((0, each) for each in columns.values())
    return None if joined is None else dataclasses.replace(joined, token_index=np.array([*columns], np.int32))

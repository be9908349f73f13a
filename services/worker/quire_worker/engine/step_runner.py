"""Runs a step so that one bad sequence fails alone.

If the runner raises for a step, each of its sequences is tried by itself; those that raise again are to blame, and the
others run as one step. Running positions twice writes the same KV twice, so nothing else is harmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import Internal, QuireError
from quire_common.telemetry.logs import get_logger
from quire_worker.engine.step_builder import select_sequences

if TYPE_CHECKING:
    from quire_worker.engine.ports import Runner
    from quire_worker.step import StepBatch, StepOutput

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`healthy` are the sequences that ran, in order; `output` is theirs alone, None where none ran."""

    healthy: list[int]
    failed: dict[int, QuireError]
    output: StepOutput | None


def run_step(runner: Runner, batch: StepBatch) -> StepOutcome:
    """One step, whatever the runner raises."""
    everyone = list(range(len(batch.count)))
    try:
        return StepOutcome(everyone, {}, runner.run(batch))
    except Exception as error:
        log.exception("step failed, looking for the sequence to blame", sequences=len(everyone))
        if len(everyone) == 1:
            return StepOutcome([], {0: _as_slot_error(error)}, None)
    failed: dict[int, QuireError] = {}
    for sequence in everyone:
        try:
            runner.run(select_sequences(batch, [sequence]))
        except Exception as error:
            failed[sequence] = _as_slot_error(error)
    healthy = [sequence for sequence in everyone if sequence not in failed]
    if not healthy:
        return StepOutcome([], failed, None)
    try:
        return StepOutcome(healthy, failed, runner.run(select_sequences(batch, healthy)))
    except Exception as error:
        log.exception("step failed without one sequence to blame", sequences=len(healthy))
        return StepOutcome([], failed | dict.fromkeys(healthy, _as_slot_error(error)), None)


def _as_slot_error(error: Exception) -> QuireError:
    if isinstance(error, QuireError):
        return error
    return Internal("STEP_FAILED", "The model failed to run this sequence.", "Retry; see the worker's log.")

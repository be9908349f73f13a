"""StepRunner: what a device does with one step, around the model: feeds back, runs, checks stops, isolates failures.

Sampled tokens never wait for the host: the last one of each slot is kept here and is what a fed row computes next. If
the runner raises for a step, each of its sequences is tried by itself; those that raise again are to blame, and the
others run as one step. Running positions twice writes the same KV twice, so nothing else is harmed.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Finish
from quire_common.errors import Internal, InvalidArgument, QuireError
from quire_common.telemetry.logs import get_logger
from quire_worker.engine.ports import StepOutcome
from quire_worker.engine.step_builder import select_sequences
from quire_worker.engine.stop_rule import finish_codes
from quire_worker.step import DeviceTiming, StepOutput

if TYPE_CHECKING:
    from quire_worker.arrays import Int32, Int64
    from quire_worker.engine.ports import Runner
    from quire_worker.step import StepBatch

log = get_logger(__name__)
_NO_TIME = DeviceTiming(0, 0, 0)
# As StepOutput.token has it.
_NOTHING_LEFT = -2


class StepRunner:
    """Belongs to the thread that runs steps."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._last_token: Int64 = np.zeros(0, np.int64)
        self._ended_ns = time.perf_counter_ns()

    def run(self, batch: StepBatch) -> StepOutcome:
        """Run a step: feed tokens back, run the model, check stops and repetition. If the runner raises, only the
        sequences that cause this fail; the error is returned in the outcome."""
        waited_ns = time.perf_counter_ns() - self._ended_ns
        self._feed(batch)
        output, failed = _run_isolated(self._runner, batch)
        token = _by_sequence(batch, output, failed)
        self._last_token[batch.slot] = np.maximum(token, 0)
        finish = finish_codes(batch, token)
        for sequence, controls in batch.controls.items():
            if not finish[sequence] and token[sequence] >= 0 and controls.repeats(int(token[sequence])):
                finish[sequence] = Finish.REPETITION
        if failed:
            finish[list(failed)] = Finish.ERROR
        self._ended_ns = time.perf_counter_ns()
        return StepOutcome(
            token=token,
            finish=finish,
            failed=failed,
            logprobs=None if output is None else output.logprobs,
            timing=_NO_TIME if output is None else output.timing,
            wait_us=waited_ns // 1000,
            scores={} if output is None else output.scores,
        )

    def _feed(self, batch: StepBatch) -> None:
        """Write the last token of each fed row's slot into the batch, and tell its logits processor state that it is
        fed."""
        slots = int(batch.slot.max()) + 1
        if slots > len(self._last_token):
            self._last_token = np.concatenate([self._last_token, np.zeros(slots - len(self._last_token), np.int64)])
        if len(batch.token) == len(batch.slot):  # one token each
            np.copyto(batch.token, self._last_token[batch.slot], where=batch.fed)
        elif batch.fed.any():
            first = np.cumsum(batch.count) - batch.count
            batch.token[first[batch.fed]] = self._last_token[batch.slot[batch.fed]]
        for sequence, controls in batch.controls.items():
            if batch.fed[sequence]:
                controls.fed(int(self._last_token[batch.slot[sequence]]))


def _run_isolated(runner: Runner, batch: StepBatch) -> tuple[StepOutput | None, dict[int, QuireError]]:
    """Run a step; if the runner raises, try each sequence alone, and run those that succeed as one step. Returns their
    output, with columns by sequence of the whole step, or None, and the errors of the others."""
    everyone = list(range(len(batch.count)))
    try:
        return _widened(runner.run(batch), everyone, batch), {}
    except Exception as error:
        log.exception("step failed, looking for the sequence to blame", sequences=len(everyone))
        if len(everyone) == 1:
            return None, {0: as_slot_error(error)}
    failed: dict[int, QuireError] = {}
    for sequence in everyone:
        try:
            runner.run(select_sequences(batch, [sequence]))
        except Exception as error:
            failed[sequence] = as_slot_error(error)
    healthy = [sequence for sequence in everyone if sequence not in failed]
    if not healthy:
        return None, failed
    try:
        return _widened(runner.run(select_sequences(batch, healthy)), healthy, batch), failed
    except Exception as error:
        log.exception("step failed without one sequence to blame", sequences=len(healthy))
        return None, failed | dict.fromkeys(healthy, as_slot_error(error))


def _widened(output: StepOutput, ran: list[int], batch: StepBatch) -> StepOutput:
    """The output of the sequences `ran`, with `token`, `token_index` and scores by sequence of the whole batch; the
    token of all others is -1."""
    count = len(batch.count)
    if len(output.token) == count:
        return output
    scores = {ran[sequence]: columns for sequence, columns in output.scores.items()}
    sampled = np.array(ran, np.int32)[batch.sample[ran]]
    token = np.full(count, -1, np.int32)
    token[sampled] = output.token
    logprobs = output.logprobs
    if logprobs is not None:
        logprobs = dataclasses.replace(logprobs, token_index=sampled[logprobs.token_index])
    return StepOutput(token, logprobs, output.timing, scores)


def _by_sequence(batch: StepBatch, output: StepOutput | None, failed: dict[int, QuireError]) -> Int32:
    """Token by sequence, negative where none was drawn. Adds to `failed` the sequences that should have drawn a token
    and could not, such as those with NaN logits."""
    if output is None:
        return np.full(len(batch.count), -1, np.int32)
    token: Int32 = output.token.astype(np.int32, copy=False)
    if int(token.min()) < 0:
        for sequence, error in failed_samples(batch, token).items():
            failed.setdefault(sequence, error)
    return token


def failed_samples(batch: StepBatch, token: Int32) -> dict[int, QuireError]:
    """By sequence, the errors of those that should have drawn a token and did not: NaN logits, nothing left to draw, or
    a failure of their controls. `token` [S] as StepOutput.token has it."""
    failed: dict[int, QuireError] = {}
    for sequence in np.flatnonzero(batch.sample & (token < 0)).tolist():
        controls = batch.controls.get(sequence)
        failure = None if controls is None else controls.failure
        failed[sequence] = failure or (nothing_left() if token[sequence] == _NOTHING_LEFT else nan_logits())
    return failed


def as_slot_error(error: Exception) -> QuireError:
    """The error of a sequence whose step raised."""
    if isinstance(error, QuireError):
        return error
    return Internal("STEP_FAILED", "The model failed to run this sequence.", "Retry; see the worker's log.")


def nan_logits() -> QuireError:
    """The error of a sequence whose logits are no numbers."""
    return Internal(
        "NAN_LOGITS",
        "The model's output for this sequence is not a number: its weights or its KV cache are damaged.",
        "Retry; if it happens again, check the weights.",
    )


def nothing_left() -> QuireError:
    """The error of a sequence that forbids itself every token, or makes a token infinitely likely."""
    return InvalidArgument(
        "NO_TOKEN_LEFT",
        "allowed_token_ids, bad_words, logit_bias, penalties, logits_processors and min_tokens of this request leave "
        "no token to draw, or make a logit infinite.",
        "Allow more tokens, or forbid fewer; choose a repetition_penalty nearer to 1.",
        param="allowed_token_ids",
    )

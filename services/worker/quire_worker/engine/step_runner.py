"""StepRunner: the device's part of a step around the model. It feeds sampled tokens back, runs the model, checks stops
and isolates failures.

Sampled tokens never wait for the host. StepRunner keeps the last token of each slot with its position; a decode row
computes this token next. A row that was held, or whose drafts were wrong, computes its positions again. If the model
raises for a step, StepRunner tries each sequence alone. Sequences that raise again fail, and the others run as one
step. Computing a position twice writes the same KV twice, so this harms no other sequence.
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
from quire_worker.engine.stop_rule import keep_tokens
from quire_worker.step import HELD, NOTHING_LEFT, DeviceTiming, StepOutput, nan_logits

if TYPE_CHECKING:
    from quire_worker.arrays import Bool, Int32, Int64
    from quire_worker.engine.ports import Drafter, RowGate, Runner
    from quire_worker.engine.stop_rule import KeptTokens
    from quire_worker.matcher.row_constraint import MaskSource, RowConstraint
    from quire_worker.step import StepBatch

log = get_logger(__name__)
_NO_TIME = DeviceTiming(0, 0, 0)


class StepRunner:
    """Belongs to the thread that runs steps. Without a drafter, no batch has drafts; without a gate, rows are held only
    for want of a mask."""

    def __init__(self, runner: Runner, drafter: Drafter | None = None, gate: RowGate | None = None) -> None:
        self._runner = runner
        self._drafter = drafter
        self._gate = gate
        # Whether the engine's positions are right for all rows without a grammar, as each samples exactly one token.
        self._plain_rows_sample_one = gate is None and (drafter is None or drafter.constrained_only)
        # The last known token of each slot, and its position. A decode row begins with them.
        self._last_token: Int64 = np.zeros(0, np.int64)
        self._position: Int32 = np.zeros(0, np.int32)
        self._ended_ns = time.perf_counter_ns()

    def run(self, batch: StepBatch) -> StepOutcome:
        """Run a step: write the last sampled tokens into decode rows, propose drafts, run the model, and keep what the
        stop rule says. Sequences fail by errors of the runner (see `_run_isolated`), or if they should sample and
        cannot; their errors are in the outcome. Kept tokens are remembered for the next step, and those of sequences
        with grammars that go on are sent to the matcher."""
        waited_ns = time.perf_counter_ns() - self._ended_ns
        self._feed(batch)
        if batch.constraints or not self._plain_rows_sample_one:
            self._resolve(batch)
        if self._drafter is not None and len(batch.drafts):
            batch.put_drafts(self._drafter.propose(batch))
        output, failed = _run_isolated(self._runner, batch)
        held = self._held(batch, output)
        sampled, complete = _by_sequence(batch, output, failed, held)
        kept = keep_tokens(batch, sampled, held)
        self._remember(batch, kept)
        send_tokens_to_matcher(batch, kept)
        finish = kept.finish
        if failed:
            finish[list(failed)] = Finish.ERROR
            # A step that was already launched must not compute the failed sequence's token again.
            self._last_token[batch.slot[list(failed)]] = 0
        self._ended_ns = time.perf_counter_ns()
        return StepOutcome(
            token=kept.token,
            finish=finish,
            failed=failed,
            logprobs=None if output is None else output.logprobs,
            timing=_NO_TIME if output is None else output.timing,
            wait_us=waited_ns // 1000,
            scores={} if output is None else output.scores,
            held=() if output is None else output.held,
            count=batch.count,
            one_token_each=(
                complete and self._plain_rows_sample_one and not len(batch.drafts) and (held is None or not held.any())
            ),
        )

    def _feed(self, batch: StepBatch) -> None:
        """Write the last token of each fed row's slot into the first token of the row. The columns by slot grow for
        slots that are new."""
        slots = int(batch.slot.max()) + 1
        if slots > len(self._last_token):
            more = slots - len(self._last_token)
            self._last_token = np.concatenate([self._last_token, np.zeros(more, np.int64)])
            self._position = np.concatenate([self._position, np.zeros(more, np.int32)])
        if len(batch.token) == len(batch.slot):  # one token each
            np.copyto(batch.token, self._last_token[batch.slot], where=batch.fed)
        elif batch.fed.any():
            first = batch.count.cumsum() - batch.count
            batch.token[first[batch.fed]] = self._last_token[batch.slot[batch.fed]]

    def _resolve(self, batch: StepBatch) -> None:
        """Write the right positions of fed rows, or only of those with grammars if all others sample one token, into
        the batch, since held rows and wrong drafts make the engine's positions too high. Recompute from them which
        sequences end by length, and whose stop ids are still blocked by min_tokens."""
        held_before = batch.fed
        if self._plain_rows_sample_one:  # only rows with a grammar may have been held, or have had drafts
            held_before = np.zeros(len(batch.slot), np.bool_)
            held_before[list(batch.constraints)] = True
            held_before &= batch.fed
        np.copyto(batch.position, self._position[batch.slot], where=held_before)
        sampled_at = batch.position + batch.count
        if len(batch.drafts):
            sampled_at -= batch.drafts
        blocked = {}
        for sequence in (batch.sample & (sampled_at < batch.min_len)).nonzero()[0].tolist():
            ids = batch.stop_id[sequence]
            if (ids >= 0).any():
                blocked[sequence] = ids[ids >= 0]
        batch.resolve(blocked, sampled_at >= batch.bound)

    def _held(self, batch: StepBatch, output: StepOutput | None) -> Bool | None:
        """Return whether each sequence is held, by the gate or for want of a mask; None: no sequence is."""
        held: Bool | None = None if self._gate is None else self._gate.held(batch) & batch.sample
        if output is not None and output.held:
            held = np.zeros(len(batch.slot), np.bool_) if held is None else held
            held[list(output.held)] = True
        return held

    def _remember(self, batch: StepBatch, kept: KeptTokens) -> None:
        """Note the last known token of each slot, and its position, for its next decode row. If the sequence kept no
        token, this is the last token that the step computed, drafts not included. If each row can only sample one
        token, that token is noted without its position, or 0 if there is none."""
        if self._plain_rows_sample_one and not batch.constraints:
            self._last_token[batch.slot] = np.maximum(kept.token[:, 0], 0)
            return
        tokens, known = kept.tokens, batch.position + batch.count - 1
        row = batch.count.cumsum() - 1
        if len(batch.drafts):
            known -= batch.drafts
            row -= batch.drafts
        last = kept.token[np.arange(len(tokens)), np.maximum(tokens - 1, 0)]
        self._last_token[batch.slot] = np.where(tokens > 0, last, batch.token[row])
        self._position[batch.slot] = known + tokens


def send_tokens_to_matcher(batch: StepBatch, kept: KeptTokens) -> None:
    """Send to the matcher which tokens the sequences with grammars keep, in one message per mask source. Sequences that
    keep no token are left out. So are sequences that finish, since they need no further masks: their constraints are
    marked as finished instead."""
    if not batch.constraints:
        return
    rows = list(batch.constraints)
    columns = zip(batch.constraints.values(), kept.token[rows].tolist(), kept.finish[rows].tolist(), strict=True)
    by_source: dict[MaskSource, list[tuple[RowConstraint, list[int]]]] = {}
    for constraint, tokens, finish in columns:
        if finish:
            constraint.finish([token for token in tokens if token >= 0])
        elif tokens[0] >= 0:
            if tokens[-1] < 0:
                tokens = [token for token in tokens if token >= 0]
            by_source.setdefault(constraint.mask_source, []).append((constraint, tokens))
    for mask_source, sampled in by_source.items():
        mask_source.add_tokens(sampled)


def _run_isolated(runner: Runner, batch: StepBatch) -> tuple[StepOutput | None, dict[int, QuireError]]:
    """Run a step. If the runner raises, run each sequence alone to find those that fail, and run the others as one
    step; a step of one sequence is not run again. If the others fail together, all sequences fail. Errors of whole
    steps are logged. Returns the output of the others, with columns by sequence of the whole step, and the errors of
    the failed ones. The output is None if all sequences fail."""
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
    """Return the output of the sequences `ran`, with tokens and scores by sequence of the whole batch. `token_index` is
    the index in these tokens; other sequences have the token -1. Tokens are [S] if all sequences ran and sample and
    none has drafts, else [S, W], where W is 1 more than the most drafts of a sequence."""
    count = len(batch.count)
    if len(output.token) == count and not len(batch.drafts):
        return output
    scores = {ran[sequence]: columns for sequence, columns in output.scores.items()}
    ids = np.array(ran, np.int64)
    drafts = batch.drafts[ids] if len(batch.drafts) else np.zeros(len(ids), np.int32)
    width = 1 + (int(batch.drafts.max()) if len(batch.drafts) else 0)
    sampled = batch.sample[ids]
    samples = 1 + drafts[sampled]
    nth = np.arange(len(output.token)) - (samples.cumsum() - samples).repeat(samples)
    place = ids[sampled].repeat(samples) * width + nth
    token = np.full(count * width, -1, np.int32)
    token[place] = output.token
    logprobs = output.logprobs
    if logprobs is not None:
        logprobs = dataclasses.replace(logprobs, token_index=place[logprobs.token_index].astype(np.int32))
    held = tuple(ran[sequence] for sequence in output.held)
    return StepOutput(token.reshape(count, width), logprobs, output.timing, scores, held)


def _by_sequence(
    batch: StepBatch, output: StepOutput | None, failed: dict[int, QuireError], held: Bool | None
) -> tuple[Int32, bool]:
    """Return tokens [S, W] by sequence, negative if none was sampled, and whether each sequence has a token. Adds to
    `failed` the sequences that could not sample, for example because of NaN logits, unless they are held."""
    if output is None:
        return np.full((len(batch.count), 1), -1, np.int32), False
    token: Int32 = output.token.astype(np.int32, copy=False).reshape(len(batch.count), -1)
    complete = int(token[:, 0].min()) >= 0
    if not complete:
        for sequence, error in failed_samples(batch, token[:, 0]).items():
            if held is None or not held[sequence]:
                failed.setdefault(sequence, error)
    return token, complete


def failed_samples(batch: StepBatch, token: Int32) -> dict[int, QuireError]:
    """Return, by sequence, the errors of sequences that should have sampled a token and did not. The causes are NaN or
    infinite logits, no token left to sample, or a failure of the sequence's controls, which is then the error. `token`
    [S] is as in StepOutput.token, or HELD."""
    failed: dict[int, QuireError] = {}
    for sequence in (batch.sample & (token < 0) & (token != HELD)).nonzero()[0].tolist():
        controls = batch.controls.get(sequence)
        failure = None if controls is None else controls.failure
        failed[sequence] = failure or (nothing_left() if token[sequence] == NOTHING_LEFT else nan_logits())
    return failed


def as_slot_error(error: Exception) -> QuireError:
    """Return the error of a sequence whose step raised: a QuireError itself, or else Internal STEP_FAILED."""
    if isinstance(error, QuireError):
        return error
    return Internal("STEP_FAILED", "The model failed to run this sequence.", "Retry; see the worker's log.")


def nothing_left() -> QuireError:
    """Return the error NO_TOKEN_LEFT of a sequence that forbids itself every token, or makes a token infinitely
    likely."""
    return InvalidArgument(
        "NO_TOKEN_LEFT",
        "allowed_token_ids, bad_words, logit_bias, penalties, logits_processors, min_tokens and the grammar of this "
        "request leave no token to draw, or make a logit infinite.",
        "Allow more tokens, or forbid fewer; choose a repetition_penalty nearer to 1.",
        param="allowed_token_ids",
    )

"""The stop rule: which sampled tokens a sequence keeps, and whether the sequence ends. Most of it is vectorised over a
step's rows. It runs on the device's thread, so that the next step does not wait for the engine.

A sequence keeps a draft only if the model sampled the same token at this position. So a sequence's tokens do not depend
on the drafter. The sequence also keeps the first sampled token that differs from its draft, but no token after it, and
no token after a stop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.credit import Finish

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_worker.arrays import Bool, Int32, Int64
    from quire_worker.step import StepBatch


class KeptTokens(NamedTuple):
    """The sampled tokens of a step that sequences keep."""

    token: Int32
    """[S, W] from the left, then negative numbers."""
    finish: NDArray[np.uint8]

    @property
    def tokens(self) -> Int64:
        """Return, [S], how many tokens each sequence keeps."""
        kept: Int64 = np.count_nonzero(self.token >= 0, axis=1)
        return kept


def finish_codes(batch: StepBatch, token: Int32, nth: int = 0) -> NDArray[np.uint8]:
    """Return the Finish of each sequence after its sampled token number `nth` (from 0) of this step, 0 if the sequence
    goes on. STOP: the token is a stop id, also if it is the last allowed one. LENGTH: the token, or a missing
    (negative) one, is the last allowed one. LIMIT: a sequence that only prefills has reached its end.

    min_tokens needs no look here: before it, stop ids cannot be sampled (`blocked`)."""
    finish = np.zeros(len(token), np.uint8)
    last = batch.last if nth == 0 else batch.position + batch.count - batch.drafts + nth >= batch.bound
    if last.any():
        finish[last] = np.where(batch.sample[last], Finish.LENGTH, Finish.LIMIT)
    if batch.stop_id.size:
        stopped = (batch.stop_id == token[:, None]).any(axis=1)
        if stopped.any():
            finish[stopped & (token >= 0)] = Finish.STOP
    return finish


def keep_tokens(batch: StepBatch, sampled: Int32, held: Bool | None) -> KeptTokens:
    """Decide which of its sampled tokens, `sampled` [S, W], each sequence keeps, and whether it ends. After its first
    token, a sequence keeps further ones as long as each draft equals the token sampled there, and nothing after its
    end. A sequence in `held` keeps nothing and goes on. Updates the logits processor states with the kept tokens."""
    first_token = sampled[:, 0]
    finish = finish_codes(batch, first_token)
    if batch.controls:
        finish = _ends(batch, first_token, finish, held)
    if held is not None:
        finish[held] = Finish.NONE
    if sampled.shape[1] == 1:
        return KeptTokens(sampled if held is None else np.where(held[:, None], np.int32(-1), sampled), finish)
    token = np.full_like(sampled, -1)
    going = np.ones(len(sampled), np.bool_) if held is None else ~held
    token[going, 0] = sampled[going, 0]
    first = batch.count.cumsum() - batch.drafts - 1
    for nth in range(1, sampled.shape[1]):
        going &= (finish == Finish.NONE) & (batch.drafts >= nth) & (sampled[:, nth] >= 0)
        going &= batch.token[np.minimum(first + nth, len(batch.token) - 1)] == sampled[:, nth - 1]
        if not going.any():
            break
        token[going, nth] = sampled[going, nth]
        codes = _ends(batch, token[:, nth], finish_codes(batch, token[:, nth], nth), ~going)
        finish[going] = codes[going]
    return KeptTokens(token, finish)


def _ends(batch: StepBatch, token: Int32, finish: NDArray[np.uint8], skipped: Bool | None) -> NDArray[np.uint8]:
    """Return the finish codes after a sampled token, changed in place. Only sequences with controls are looked at, one
    after the other: a sequence whose repetition rule applies after this token gets REPETITION, unless it ends anyway.
    Sequences in `skipped`, or without a token, are left as they are. Updates the logits processor states of the others
    with their token."""
    for sequence, controls in batch.controls.items():
        sampled = int(token[sequence])
        if sampled < 0 or (skipped is not None and skipped[sequence]):
            continue
        if not finish[sequence] and controls.repeats(sampled):
            finish[sequence] = Finish.REPETITION
        controls.fed(sampled)
    return finish

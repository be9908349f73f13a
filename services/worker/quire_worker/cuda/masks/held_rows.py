"""Held rows of a step on a GPU: rows whose mask was missing when the device sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_worker.engine.step_runner import send_tokens_to_matcher
from quire_worker.engine.stop_rule import KeptTokens
from quire_worker.step import HELD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_worker.arrays import Int32
    from quire_worker.step import StepBatch


def pop_held(batch: StepBatch, token: Int32) -> tuple[int, ...]:
    """Return the indices of the step's sequences that were held. The device marks their tokens [S] with HELD; they
    become -1 in place. Empty without grammars."""
    if not batch.constraints:
        return ()
    held = (token == HELD).nonzero()[0]
    token[held] = -1
    return tuple(held.tolist())


def send_tokens(batch: StepBatch, token: Int32, finish: NDArray[np.uint8]) -> None:
    """Send the tokens [S] of sequences with grammars to the matcher, except for those that finish."""
    send_tokens_to_matcher(batch, KeptTokens(token[:, None], finish))

"""Rows that are held for want of a mask, as results come in."""

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
    """The sequences of a step that were held, by what the device says of their tokens [S], which become -1."""
    if not batch.constraints:
        return ()
    held = np.flatnonzero(token == HELD)
    token[held] = -1
    return tuple(held.tolist())


def send_tokens(batch: StepBatch, token: Int32, finish: NDArray[np.uint8]) -> None:
    """Pass the tokens [S] of sequences with grammars on to the matcher, unless they end with it."""
    send_tokens_to_matcher(batch, KeptTokens(token[:, None], finish))

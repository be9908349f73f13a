"""The stop rule: does a sequence end with the token that it just drew? Vectorised over a step's rows, and run where the
tokens are, so that nobody waits for the host to look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Finish

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_worker.arrays import Int32
    from quire_worker.step import StepBatch


def finish_codes(batch: StepBatch, token: Int32) -> NDArray[np.uint8]:
    """Finish code of each sequence after this step, 0 if it goes on. A stop id that is also the last allowed token is a
    stop.

    min_tokens needs no look here: before it, stop ids cannot be drawn (`blocked`).
    """
    finish = np.zeros(len(token), np.uint8)
    if batch.last.any():
        finish[batch.last] = np.where(batch.sample[batch.last], Finish.LENGTH, Finish.LIMIT)
    if batch.stop_id.size:
        stopped = (batch.stop_id == token[:, None]).any(axis=1)
        if stopped.any():
            finish[stopped & (token >= 0)] = Finish.STOP
    return finish

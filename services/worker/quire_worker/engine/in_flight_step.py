"""InFlightStep: the host's record of a step that was launched and has not completed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire_worker.step import StepSize

if TYPE_CHECKING:
    from quire_worker.arrays import Bool, Int32, Int64


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """One entry per sequence of the batch in each column, decode rows first."""

    step: int
    applied: int
    """The Grant that was applied at its launch."""
    slot: Int32
    slot_generation: Int64
    """Who held the slot: by now it may be another."""
    count: Int32
    position: Int32
    """The first row's position. The device has the positions of rows that decode: see StepBatch.fed."""
    sample: Bool
    decodes: int
    has_drafts: bool
    """Whether it was launched with drafts. The device may have left out some of them, or all."""
    prepare_us: int

    def size(self, sampled: int, ran: Int32 | None = None) -> StepSize:
        """Return the step's work: its tokens, how many of them are prefill, and the number `sampled`. Also the pairs of
        a token and a token that it attends to, and the positions whose KV is read, as if no layer had a window. `ran`:
        how many rows of each sequence the device ran; None: all rows that were launched."""
        rows = self.count if ran is None else ran
        tokens, context, decodes = int(rows.sum()), int((self.position + rows).sum()), self.decodes
        if tokens == len(rows):
            return StepSize(tokens, tokens - decodes, sampled, context, context)
        count = rows.astype(np.int64)
        pairs = int((count * self.position + count * (count + 1) // 2).sum())
        return StepSize(tokens, int(count[decodes:].sum()), sampled, pairs, context)

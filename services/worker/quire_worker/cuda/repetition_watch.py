"""RepetitionWatch: ends sequences by their repetition rule, as their tokens come from the device.

The device does not apply this rule. When a repetition is found, the sequence's next step may already be launched. Its
row is then ignored, as after any other end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.credit import Finish
from quire_worker.step import HELD

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire_worker.arrays import Int32
    from quire_worker.step import StepBatch


class RepetitionWatch:
    """Belongs to the thread that takes results; steps come in the order of their launch."""

    def __init__(self) -> None:
        self._sampled: dict[int, int] = {}

    def end(self, batch: StepBatch, token: Int32, finish: NDArray[np.uint8]) -> None:
        """Mark in `finish` the sequences whose sampled token [S] completes a repetition, unless they have ended. Only
        sequences with a repetition rule are looked at; the tokens that they feed are passed to their logits processor
        states.

        A row that was held fed its token then, and feeds it once more in this step; its state gets it once. `token` may
        be HELD."""
        for sequence, controls in batch.controls.items():
            if not controls.watches_repetition:
                continue
            slot, sampled = int(batch.slot[sequence]), int(token[sequence])
            # Nothing is known of one whose first step could not be launched; it has failed.
            before = self._sampled.get(slot, 0)
            if batch.fed[sequence] and before != HELD:
                controls.fed(before)
            self._sampled[slot] = sampled if sampled == HELD else max(sampled, 0)
            if not finish[sequence] and sampled >= 0 and controls.repeats(sampled):
                finish[sequence] = Finish.REPETITION

"""StepColumns: one host buffer into which steps are packed, and a record of its contents.

While the same sequences decode, a step differs little from the step before, so the columns that their starts have fixed
are not written again. StepBuilder keeps those arrays while the same slots run. So StepColumns only compares the
identity of the arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_worker.arrays import Int32
    from quire_worker.cuda.step_layout import StepLayout
    from quire_worker.step import StepBatch


class StepColumns:
    """`words`: the buffer, which nobody else writes."""

    def __init__(self, words: Int32) -> None:
        self.words = words
        self._held: tuple[StepLayout, StepBatch] | None = None

    def pack(self, layout: StepLayout, batch: StepBatch, control: Mapping[int, int]) -> int:
        """Write a step into the buffer. Only changes are written if the step continues the one in this buffer (see
        is_next_step) in the same layout, without logits processor states or even tiling. Returns how many words are
        used. `control`: sequence -> address of its logits processor state."""
        held, self._held = self._held, None  # nothing that is known, if this raises
        # Rows that decode have tiles too where those are even, and their order changes; sheets come and go.
        repeats = held is not None and held[0] is layout and not layout.size.controlled and not layout.tiling.even
        if held is not None and repeats and is_next_step(held[1], batch):
            used = layout.pack_next(batch, self.words, held[1].position)
        else:
            used = layout.pack(batch, self.words, control)
        self._held = layout, batch
        return used


def is_next_step(before: StepBatch, now: StepBatch) -> bool:
    """Whether `now` runs the same sequences as `before`, and all of them decode. The arrays that StepBuilder keeps are
    compared by identity. False if a sequence may not stop yet in either step."""
    same = now.params is before.params and now.fed is before.fed and now.sample is before.sample
    return same and not now.blocked and not before.blocked and bool(now.fed.all())

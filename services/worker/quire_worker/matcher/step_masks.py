"""`fetch_masks` reads the masks of one step, for a runner on the CPU that is about to sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire_worker.sampling.token_mask import TokenMask
    from quire_worker.step import StepBatch, StepSamples


def fetch_masks(batch: StepBatch, samples: StepSamples) -> tuple[dict[int, TokenMask], tuple[int, ...]]:
    """Return the masks of the rows that sample by a grammar, by index in `samples`, and the indices in the batch of the
    sequences whose mask is missing."""
    masks: dict[int, TokenMask] = {}
    held = []
    if not batch.constraints:
        return masks, ()
    first = np.searchsorted(samples.sequence, list(batch.constraints))
    positions = samples.sample_position[first].tolist()
    for (sequence, constraint), draw, position in zip(
        batch.constraints.items(), first.tolist(), positions, strict=True
    ):
        mask = constraint.mask_at(position)
        if mask is None:
            held.append(sequence)
        else:
            masks[draw] = mask
    return masks, tuple(held)

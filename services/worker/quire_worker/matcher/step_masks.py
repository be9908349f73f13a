"""The masks of one step's draws, as a runner asks for them just before it draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire_worker.sampling.token_mask import TokenMask
    from quire_worker.step import Draws, StepBatch


def fetch_masks(batch: StepBatch, draws: Draws) -> tuple[dict[int, TokenMask], tuple[int, ...]]:
    """Return the masks by draw, of the draws whose sequence has a grammar, and the sequences whose mask is not
    there."""
    masks: dict[int, TokenMask] = {}
    held = []
    if not batch.constraints:
        return masks, ()
    first = np.searchsorted(draws.sequence, list(batch.constraints))
    positions = draws.drawn_at[first].tolist()
    for (sequence, constraint), draw, position in zip(
        batch.constraints.items(), first.tolist(), positions, strict=True
    ):
        mask = constraint.mask_at(position)
        if mask is None:
            held.append(sequence)
        else:
            masks[draw] = mask
    return masks, tuple(held)

"""The masks of one step, for a device that runs on the CPU: `ForcedTokens` reads masks before the step, and proposes
the tokens that grammars force as drafts; `fetch_masks` reads masks just before the step samples.

Where the mask of a position allows one token only, the model is sure to sample this token, so that such a draft is
always right. The matcher computes these masks ahead; see lookahead_grammar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from quire_worker.sampling.token_mask import MaskKind

if TYPE_CHECKING:
    from quire_worker.arrays import Int32
    from quire_worker.engine.ports import Drafter
    from quire_worker.sampling.token_mask import TokenMask
    from quire_worker.step import StepBatch, StepSamples

MAX_CONSTRAINED_ROW_TOKENS: Final = 8
"""The most tokens that a row of a sequence with a grammar may sample in one step, on a device that runs drafts. The
name of a property in a JSON schema has about as many tokens."""


class ForcedTokens:
    """Implements Drafter. Belongs to the device's thread. `other` proposes the drafts of sequences without a grammar;
    None: these sequences have no drafts."""

    def __init__(self, other: Drafter | None = None) -> None:
        self._other = other
        self.constrained_only = other is None

    def propose(self, batch: StepBatch) -> Int32:
        """Return the forced tokens of sequences with grammars, as far as their masks are there, and the drafts of the
        other drafter for the rest: ids [S, max(batch.drafts)]. A sequence with a grammar, and any without another
        drafter, has -1 from where its drafts end."""
        if self._other is None:
            proposed = np.full((len(batch.drafts), int(batch.drafts.max(initial=0))), -1, np.int32)
        else:
            proposed = self._other.propose(batch)
        first = (batch.position + batch.count - batch.drafts).tolist()
        for sequence, constraint in batch.constraints.items():
            proposed[sequence] = -1
            for nth in range(int(batch.drafts[sequence])):
                mask = constraint.mask_at(first[sequence] + nth)
                if mask is None or mask.kind != MaskKind.ONE:
                    break
                proposed[sequence, nth] = mask.token
        return proposed


class StepMasks(NamedTuple):
    """The masks of a step, by index in its StepSamples."""

    masks: dict[int, TokenMask]
    held: tuple[int, ...] = ()
    """Indices in the batch of the sequences that lack the mask of their first sample."""
    missing: tuple[int, ...] = ()
    """Indices in StepSamples of the samples of drafts whose mask is missing. The tokens of these samples must not be
    kept."""


def fetch_masks(batch: StepBatch, samples: StepSamples) -> StepMasks:
    """Return the masks of all samples of sequences with grammars, as far as they are there. A sequence whose first mask
    is missing is held, and its other masks are not read. A later mask that is missing is listed in `missing`, and its
    sequence is not held."""
    masks: dict[int, TokenMask] = {}
    if not batch.constraints:
        return StepMasks(masks)
    held, missing = [], []
    begin = np.searchsorted(samples.sequence, list(batch.constraints))
    positions = samples.sample_position[begin].tolist()
    for (sequence, constraint), first, position in zip(
        batch.constraints.items(), begin.tolist(), positions, strict=True
    ):
        mask = constraint.mask_at(position)
        if mask is None:
            held.append(sequence)
            continue
        masks[first] = mask
        for nth in range(1, 1 + int(batch.drafts[sequence]) if len(batch.drafts) else 1):
            mask = constraint.mask_at(position + nth)
            if mask is None:
                missing.append(first + nth)
            else:
                masks[first + nth] = mask
    return StepMasks(masks, tuple(held), tuple(missing))

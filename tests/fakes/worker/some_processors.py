"""Logits processors of tests: one whose every choice depends on all that was said, and one that fails in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire_worker.arrays import Float32, Int32
    from quire_worker.sampling.logits_processor import LogitsProcessors


def contrary(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
    """Forbids what was said last, and a fifth of all tokens, chosen by what was said before."""
    said = int(prompt_ids.sum()) + 7 * int(output_ids.sum()) + len(output_ids)
    changed = logits.copy()
    changed[said % 5 :: 5] = -np.inf
    changed[output_ids[-1:]] = -np.inf
    return changed


def weary(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
    """Fails at the fourth token."""
    if len(output_ids) == 3:
        raise RuntimeError("no more")
    return logits


PROCESSORS: LogitsProcessors = {"contrary": contrary, "weary": weary}

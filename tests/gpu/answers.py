"""Greedy answers against the float32 reference, token by token: was each as good as the best there was?

The reference goes through prompt and answer at once; it knows no pages of others, and nothing of when who was served.
"""

from __future__ import annotations

import numpy as np
import torch

from quire_common.sequence import Sequence
from quire_worker.arrays import Float32
from quire_worker.runner import ModelRunner
from quire_worker.sampling.param_rows import param_rows
from quire_worker.step import StepBatch


def is_plain(sequence: Sequence) -> bool:
    """Whether nothing but the logits decides what its tokens are."""
    return sequence.sampling.temperature == 0 and sequence.sampling.controls is None and not sequence.stop.min_tokens


def worst_choice(runner: ModelRunner, sequence: Sequence, tokens: list[int]) -> float:
    """How much better a token there was than the one that was chosen, at the worst; as a part of the largest logit."""
    prompt = sequence.prompt_ids.tolist()
    logits = all_logits(runner, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    worst = 0.0
    for row, token in zip(logits, tokens, strict=True):
        worst = max(worst, float(row.max() - row[token]) / max(1.0, float(np.abs(row).max())))
    return worst


@torch.inference_mode()
def all_logits(runner: ModelRunner, tokens: list[int]) -> Float32:
    """[len(tokens), V], computed from nothing on pages of its own."""
    size, count = runner.pool.page_size, len(tokens)
    one = np.zeros(1, np.int32)
    batch = StepBatch(
        np.array(tokens, np.int64), one + count, one, np.arange(1, -(-count // size) + 1, dtype=np.int32)[None, :],
        np.ones(1, np.bool_), param_rows(1), one - 1,
    )  # fmt: skip  # neutral columns
    found: Float32 = runner.all_logits(batch).numpy()
    return found

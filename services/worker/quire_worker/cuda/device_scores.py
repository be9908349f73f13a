"""Logprobs of prompt tokens, computed on the device right after the step that ran their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire_worker.cuda.device_logprobs import PendingLogprobs, start_logprobs
from quire_worker.sampling.logprobs import join_columns

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from quire_worker.step import Int32, LogprobColumns, StepBatch

# Logits of so many prompt rows are there at once.
_SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Part:
    pending: PendingLogprobs
    token: Int32


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Complete once the step's event is."""

    parts: dict[int, list[_Part]]

    def columns(self) -> dict[int, LogprobColumns]:
        """As StepOutput.scores."""
        found = {}
        for sequence, parts in self.parts.items():
            columns = [part.pending.columns(part.token) for part in parts]
            found[sequence] = join_columns([each for each in columns if each is not None])
        return found


@torch.inference_mode()
def start_scores(
    hidden: Tensor, logits_of: Callable[[Tensor], Tensor], batch: StepBatch, first: Int32
) -> PendingScores:
    """Of the step's hidden rows [R, H], `first` [S] being each sequence's first. Asynchronous on a CUDA device."""
    parts: dict[int, list[_Part]] = {}
    for sequence, scores in batch.scores.items():
        for begin in range(0, len(scores.token), _SCORED_ROWS):
            token = scores.token[begin : begin + _SCORED_ROWS]
            count, row = len(token), int(first[sequence]) + begin
            logits = logits_of(hidden[row : row + count])
            there = torch.from_numpy(token.astype(np.int32))
            if hidden.device.type == "cuda":
                there = there.pin_memory().to(hidden.device, non_blocking=True)
            order = np.arange(count, dtype=np.int32)
            pending = start_logprobs(logits, there, order, order, np.full(count, scores.wanted, np.int32))
            parts.setdefault(sequence, []).append(_Part(pending, token))
    return PendingScores(parts)

"""Logprobs of prompt tokens, computed on the device right after the step that ran their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire_worker.cuda.device_logprobs import PendingLogprobs
from quire_worker.ops.triton.logprobs import packed_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from quire_common.credit import LogprobColumns
    from quire_worker.arrays import Int32
    from quire_worker.step import PromptScores, StepBatch

# Logits of so many prompt rows are there at once.
_SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Logprobs of prompt tokens that are being copied to the host. They are complete once the step's event is."""

    pending: dict[int, tuple[PendingLogprobs, Int32]]
    """Of a sequence's prompt tokens, and these."""

    def columns(self) -> dict[int, LogprobColumns]:
        """Return, by sequence, the logprobs of its prompt tokens. Sequences without any are left out. Call this only
        once the step's event has passed."""
        found = {sequence: pending.columns(token) for sequence, (pending, token) in self.pending.items()}
        return {sequence: columns for sequence, columns in found.items() if columns is not None}


@torch.inference_mode()
def start_scores(
    hidden: Tensor, logits_of: Callable[[Tensor], Tensor], batch: StepBatch, first: Int32
) -> PendingScores:
    """Begin to compute and download the logprobs of prompt tokens that the batch asks for, from the step's hidden rows
    [R, H]; `first` [S] is each sequence's first row. Asynchronous on a CUDA device."""
    pending = {}
    for sequence, scores in batch.scores.items():
        begin = int(first[sequence])
        packed = _download(_packed(hidden[begin : begin + len(scores.token)], logits_of, scores))
        order = np.arange(len(scores.token), dtype=np.int32)
        wanted = np.full(len(order), scores.wanted, np.int32)
        pending[sequence] = PendingLogprobs(order, wanted, packed), scores.token
    return PendingScores(pending)


def _packed(hidden: Tensor, logits_of: Callable[[Tensor], Tensor], scores: PromptScores) -> Tensor:
    """Logprobs of one sequence's prompt tokens, on the device, packed as in ops/triton/logprobs.py; their logits are
    computed a few rows at a time."""
    token = torch.from_numpy(scores.token.astype(np.int32))
    if hidden.is_cuda:
        token = token.pin_memory().to(hidden.device, non_blocking=True)
    row = torch.arange(_SCORED_ROWS, dtype=torch.int32, device=hidden.device)
    parts = []
    for begin in range(0, len(token), _SCORED_ROWS):
        logits, tokens = logits_of(hidden[begin : begin + _SCORED_ROWS]), token[begin : begin + _SCORED_ROWS]
        most = min(scores.wanted, logits.shape[1])
        parts.append(packed_logprobs(logits, tokens, row[: len(tokens)], most))
    return torch.cat(parts)


def _download(packed: Tensor) -> Tensor:
    """Begin to copy to pinned host memory; a tensor of the CPU is returned as it is."""
    if not packed.is_cuda:
        return packed
    return torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)

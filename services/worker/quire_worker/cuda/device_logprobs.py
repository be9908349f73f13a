"""Logprobs of a step's tokens, computed on the device right after it, before the next step overwrites its logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_worker.step import Int32, LogprobColumns


@dataclass(slots=True)
class PendingLogprobs:
    """Host copies that are complete once the step's event is."""

    sequence: Int32
    """Of the batch, by entry."""
    wanted: Int32
    """Alternatives asked for, by entry."""
    chosen: Tensor
    rank: Tensor
    top_id: Tensor
    top_logprob: Tensor

    def columns(self, token: Int32) -> LogprobColumns | None:
        """Entries of sequences that drew a token."""
        kept = np.flatnonzero(token[self.sequence] >= 0)
        if not len(kept):
            return None
        count = self.wanted[kept]
        inside = np.arange(self.top_id.shape[1])[None, :] < count[:, None]
        return LogprobColumns(
            token_index=self.sequence[kept],
            logprob=self.chosen.numpy()[kept],
            rank=self.rank.numpy()[kept],
            top_count=count,
            top_id=self.top_id.numpy()[kept][inside],
            top_logprob=self.top_logprob.numpy()[kept][inside],
        )


@torch.inference_mode()
def start_logprobs(logits: Tensor, token: Tensor, row: Int32, sequence: Int32, wanted: Int32) -> PendingLogprobs:
    """Of logits [S, V] and tokens [S] on the device: entries for the given rows, asynchronously.

    `row` [L] of logits, `sequence` [L] of the batch, `wanted` [L] alternatives. Raw logits, natural logarithms; among
    equal logits the lower id comes first.
    """
    device = logits.device
    index = _pinned(torch.from_numpy(row.astype(np.int64)), device).to(device, non_blocking=True)
    rows = logits.index_select(0, index).float()
    drawn = token.index_select(0, index).clamp(min=0).long()[:, None]
    normaliser = torch.logsumexp(rows, dim=1, keepdim=True)
    chosen = rows.gather(1, drawn)
    rank = 1 + (rows > chosen).sum(dim=1, dtype=torch.int32)
    most = min(int(wanted.max()), rows.shape[1])
    bits = rows.view(torch.int32)
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    # One integer that sorts by logit, then by lower id.
    key = (ordered << 32) | (0x7FFFFFFF - torch.arange(rows.shape[1], device=device))
    top_id = 0x7FFFFFFF - (key.topk(most, dim=1).values & 0xFFFFFFFF)
    top = rows.gather(1, top_id) - normaliser
    return PendingLogprobs(
        sequence,
        np.minimum(wanted, rows.shape[1]).astype(np.int32),
        _download((chosen - normaliser)[:, 0]),
        _download(rank),
        _download(top_id.int()),
        _download(top),
    )


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _download(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

"""Logprobs of a step's tokens, computed on the device right after it, before the next step overwrites its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire_common.credit import LogprobColumns
from quire_worker.cuda.pinned_ring import PinnedRing
from quire_worker.ops.triton.logprobs import packed_logprobs

if TYPE_CHECKING:
    from quire_worker.arrays import Int32


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Logprobs that are being copied to the host. The copy is complete once the step's event is."""

    sequence: Int32
    """Of the batch, by entry."""
    wanted: Int32
    """Alternatives asked for, by entry."""
    packed: Tensor
    """See ops/triton/logprobs.py."""

    def columns(self, token: Int32) -> LogprobColumns | None:
        """Return the downloaded logprobs of the sequences that sampled a token (`token` by sequence, negative: none);
        None if there are none. Call this only after the step's event has passed."""
        kept = (token[self.sequence] >= 0).nonzero()[0]
        if not len(kept):
            return None
        packed: Int32 = self.packed.numpy()[kept]
        most = (packed.shape[1] - 2) // 2
        count = np.minimum(self.wanted[kept], most).astype(np.int32)
        inside = np.arange(most)[None, :] < count[:, None]
        return LogprobColumns(
            token_index=self.sequence[kept],
            logprob=packed[:, 0].view(np.float32),
            rank=packed[:, 1],
            top_count=count,
            top_id=packed[:, 2 : 2 + most][inside],
            top_logprob=packed[:, 2 + most :][inside].view(np.float32),
        )


class DeviceLogprobs:
    """Begins the logprobs of a device's steps, all on one stream. What `start` returned must have been read before it
    is called for the `turns`-th time after that. Belongs to the model thread."""

    def __init__(self, device: torch.device, turns: int) -> None:
        self._device = device
        self._uploads = PinnedRing(turns, device)
        self._downloads = PinnedRing(turns, device)
        self._row: Int32 = np.empty(0, np.int32)
        self._row_there = torch.empty(0, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def start(self, logits: Tensor, token: Tensor, row: Int32, sequence: Int32, wanted: Int32) -> PendingLogprobs:
        """Begin to compute and download logprobs of `token` [S] under `logits` [S, V], for the given rows; returns at
        once.

        `row` [L] has rows of `logits` and `token`, `sequence` [L] the batch's sequence of each, and `wanted` [L] the
        number of alternatives for each."""
        most = min(int(wanted.max()), logits.shape[1])
        packed = packed_logprobs(logits, token, self._upload(row), most)
        host = self._downloads.next_buffer(packed.numel()).view(packed.shape)
        return PendingLogprobs(sequence, wanted, host.copy_(packed, non_blocking=True))

    def _upload(self, row: Int32) -> Tensor:
        """The rows on the device; they are uploaded only if they differ from those of the step before."""
        if not np.array_equal(row, self._row):
            host = self._uploads.next_buffer(len(row))
            host.copy_(torch.from_numpy(row))
            self._row, self._row_there = row, host.to(self._device, non_blocking=True, copy=True)
        return self._row_there

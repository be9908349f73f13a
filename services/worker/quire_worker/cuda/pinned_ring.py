"""PinnedRing: host buffers that are used in turn, since pinned memory is slow to allocate."""

from __future__ import annotations

import torch
from torch import Tensor


class PinnedRing:
    """A ring of pinned buffers. `next_buffer` returns a buffer again after `turns` more calls; by then, nothing may
    read or write it any more. Buffers grow as needed. `device` is the device whose copies go through them."""

    def __init__(self, turns: int, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32)] * turns
        self._turn = 0

    def next_buffer(self, words: int) -> Tensor:
        """Return the next buffer of the ring as int32 [words], uninitialised. If it is too small, a buffer of a power
        of two replaces it."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        if len(self._buffers[turn]) < words:
            room = 1 << max(0, words - 1).bit_length()
            self._buffers[turn] = torch.empty(room, dtype=torch.int32, pin_memory=self._pinned)
        return self._buffers[turn][:words]

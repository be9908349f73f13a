"""PinnedRing: host buffers that are taken in turn, since pinned memory is slow to allocate."""

from __future__ import annotations

import torch
from torch import Tensor


class PinnedRing:
    """A buffer is another taker's again after `turns` more: longer than anything is under way. Buffers grow to what is
    asked for. `device`: whose copies go through it."""

    def __init__(self, turns: int, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32)] * turns
        self._turn = 0

    def take(self, words: int) -> Tensor:
        """int32 [words], uninitialised."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        if len(self._buffers[turn]) < words:
            room = 1 << max(0, words - 1).bit_length()
            self._buffers[turn] = torch.empty(room, dtype=torch.int32, pin_memory=self._pinned)
        return self._buffers[turn][:words]

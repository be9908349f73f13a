"""Memory that is reused from step to step: fresh buffers would be paged in anew each time."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Scratch:
    """Named float32 buffers that grow and never shrink. A buffer is valid until its name is taken again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A contiguous tensor of the shape; what it holds is left over from before."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            # Zeros, since left-over NaNs in padding would spread.
            buffer = self._buffers[name] = torch.zeros(size)
        return buffer[:size].view(shape)

"""Memory that is reused from step to step. Fresh buffers would cause page faults in each step."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

_MOST_SHAPES = 256


class Scratch:
    """Named float32 buffers that grow and never shrink. A buffer is valid until the next call with its name.

    Buffers of different names share no memory. A name and shape get the same tensor object again, until any buffer
    grows or 256 such objects are kept.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._taken: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.replaced = 0
        """The number of allocations so far, including the first one of each name."""

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Return the named buffer's memory as a contiguous float32 tensor of the shape. It holds old values, or zeros
        after it was allocated.

        A buffer that is missing or too small is allocated anew, and `replaced` counts this. The tensor objects of all
        names are then made anew; the other buffers keep their memory.
        """
        taken = self._taken.get((name, shape))
        if taken is not None:
            return taken
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            # Zeros, since old NaNs in padding would spread.
            buffer = self._buffers[name] = torch.zeros(size)
            self._taken.clear()
            self.replaced += 1
        if len(self._taken) >= _MOST_SHAPES:
            self._taken.clear()
        taken = self._taken[name, shape] = buffer[:size].view(shape)
        return taken

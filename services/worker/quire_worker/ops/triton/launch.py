"""Helpers of the launchers. A launcher takes torch tensors, and chooses the grid and the block sizes of a kernel.

All launchers are asynchronous and can be captured in a CUDA graph: they do not synchronize with the host, and allocate
only through torch's caching allocator. `pdl` says that the kernel before this one on the stream is also one of these
kernels (see kernels/common.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire_worker.ops.triton.kernels.common import INTERPRET

_ON_DEVICE = not INTERPRET.value


def power_of_two(value: int) -> int:
    """Return the least power of two that is at least this number."""
    return 1 << max(0, value - 1).bit_length()


def options(pdl: bool, **more: Any) -> dict[str, Any]:
    """Return launch options that the interpreter does not take."""
    pdl = pdl and _ON_DEVICE
    return {"PDL": pdl, **({"launch_pdl": True} if pdl else {}), **more}


def empty_like_rows(x: Tensor, columns: int) -> Tensor:
    """Return an uninitialized tensor [rows of x, columns] of x's type."""
    return torch.empty((x.shape[0], columns), dtype=x.dtype, device=x.device)

"""Launchers of the kernels, with types and shapes: torch tensors in, grids and block sizes chosen here.

All are asynchronous and capturable: no host synchronisation, no allocation but torch's own caching one. `pdl` says that
the kernel before on the stream is one of these too (see kernels/common.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire_worker.ops.triton.kernels.common import INTERPRET

_ON_DEVICE = not INTERPRET.value


def power_of_two(value: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(0, value - 1).bit_length()


def options(pdl: bool, **more: Any) -> dict[str, Any]:
    """Launch options that the interpreter does not take."""
    pdl = pdl and _ON_DEVICE
    return {"PDL": pdl, **({"launch_pdl": True} if pdl else {}), **more}


def empty_like_rows(x: Tensor, columns: int) -> Tensor:
    """[rows of x, columns] of its type, uninitialised."""
    return torch.empty((x.shape[0], columns), dtype=x.dtype, device=x.device)

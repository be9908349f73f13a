"""Launcher of feed_kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from quire_worker.ops.triton.kernels.feed import feed_kernel
from quire_worker.ops.triton.launch import options

_BLOCK = 256


def feed_tokens(token: Tensor, fed: Tensor, sequence: Tensor, slot: Tensor, last_token: Tensor) -> Tensor:
    """Return int32 [R]: the last token of the row's slot (0 for a negative slot) if fed [R] is not 0, else token [R].
    sequence [R] indexes slot [S]."""
    out = torch.empty_like(token)
    rows = token.shape[0]
    feed_kernel[(-(-rows // _BLOCK),)](
        token, fed, sequence, slot, last_token, out, rows, BLOCK=_BLOCK, **options(pdl=False)
    )
    return out

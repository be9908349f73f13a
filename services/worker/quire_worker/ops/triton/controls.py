"""Launcher of control_kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_worker.ops.triton.kernels.control import control_kernel
from quire_worker.ops.triton.launch import options, power_of_two

_BLOCK = 4096


@dataclass(slots=True)
class ControlColumns:
    """Device tensors of N rows; see control_kernel."""

    address: Tensor
    """int64; 0: the row has no controls."""
    first_row: Tensor
    """int32."""
    fed: Tensor
    """int32 [tokens]; 2: a held row feeds this token once more."""
    slot: Tensor
    """int32."""
    blocked: Tensor
    """int32."""
    stop_id: Tensor
    """int32 [N, I]."""


def change_logits(logits: Tensor, columns: ControlColumns, last_token: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Launch the kernel that applies logits processor states to logits [N, V], and return the changed copy, float32 [N,
    V]. Only rows with an address are written; the other rows are uninitialised. The states of these rows take the
    tokens with fed 1, from last_token [slots] int32. `allowed`: see RowMasks; None if no row has a grammar."""
    rows, vocab = logits.shape
    changed = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    control_kernel[(rows,)](
        logits,
        columns.address,
        columns.first_row,
        columns.fed,
        columns.slot,
        last_token,
        columns.blocked,
        columns.stop_id,
        changed,
        columns.slot if allowed is None else allowed,
        vocab,
        columns.stop_id.shape[1],
        BLOCK=min(_BLOCK, power_of_two(vocab)),
        MASKED=allowed is not None,
        **options(pdl=False, num_warps=8),
    )
    return changed

"""`rotate_heads` rotates queries and keys by one kernel, in the form in which modelling code of transformers asks."""

from __future__ import annotations

import torch
from torch import Tensor

from quire_worker.ops.triton.kernels.rope import rotate_heads_kernel
from quire_worker.ops.triton.launch import options, power_of_two


def rotate_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """query [1, Q, R, D], key [1, K, R, D], cos and sin [1, R, A] -> both rotated: of the first A values of a head, the
    halves x1, x2 become x1 cos - x2 sin, x2 cos + x1 sin; the others stay. Raises ValueError for another layout of
    query or cos, or if `unsqueeze_dim`, the axis of heads, is not 1."""
    if unsqueeze_dim != 1 or len(query) != 1 or cos.shape != (1, query.shape[2], cos.shape[2]):
        raise ValueError(f"queries {tuple(query.shape)}, angles {tuple(cos.shape)}, heads on axis {unsqueeze_dim}")
    _, heads, rows, dim = query.shape
    rotated, cos, sin = cos.shape[2], cos.contiguous(), sin.contiguous()
    query, key = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key))
    query_out, key_out = (_rows_of(each, copied=rotated < dim) for each in (query, key))
    rotate_heads_kernel[(rows, heads + key.shape[1])](
        query,
        key,
        cos,
        sin,
        query_out,
        key_out,
        *(stride for each in (query, key, query_out, key_out) for stride in (each.stride(2), each.stride(1))),
        HEADS=heads,
        DIM=rotated,
        LANES=power_of_two(rotated // 2),
        **options(False, num_warps=1),
    )
    return query_out, key_out


def _rows_of(heads: Tensor, *, copied: bool) -> Tensor:
    """Return a new tensor of the shape of `heads`, [1, heads, R, D], in which the heads of a row lie beside each other.
    It holds the values of `heads` if `copied`, else it is uninitialised."""
    rows = torch.empty_like(heads.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return rows.copy_(heads) if copied else rows

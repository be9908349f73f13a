"""Launcher of sigmoid_gate_kernel."""

from __future__ import annotations

from torch import Tensor

from quire_worker.ops.triton.kernels.activation import sigmoid_gate_kernel
from quire_worker.ops.triton.launch import options

_BLOCK = 1024


def sigmoid_gate(x: Tensor, gate: Tensor, pdl: bool) -> None:
    """Multiply x [R, I] by the sigmoid of gate [R, I], in place. Both are contiguous. `pdl`: see launch.py."""
    rows, columns = x.shape
    sigmoid_gate_kernel[(rows, -(-columns // _BLOCK))](x, gate, columns, BLOCK=_BLOCK, **options(pdl))

"""Products: y = x @ weight.T by the way that was measured to be the fastest for the shape.

A way is a value; the table that maps shapes to ways is data (see product_tables), made by
`bench/gpu/choose_products.py`. A shape that no table knows goes to cuBLAS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from quire_worker.ops.triton.gated_products import Gated, GatedProducts, multiply_gated
from quire_worker.ops.triton.kernels.even_product import even_product_kernel
from quire_worker.ops.triton.kernels.product import gemv_kernel, split_product_kernel, tall_product_kernel
from quire_worker.ops.triton.launch import options
from quire_worker.ops.weight import DenseWeight, Weight


@dataclass(frozen=True, slots=True)
class Gemv:
    """Sums over the weight's rows; for one or two rows of x."""

    block_n: int
    block_k: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tall:
    """Matrix instructions, the weight as the tall operand; for up to `columns` rows of x."""

    columns: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    shares: int = 1
    """More than 1: so many tiles of the inner dimension a turn, summed at the end; a warp may have several."""


_EVEN_ROWS, _EVEN_OUTPUTS = 64, 64
Way = Gemv | Tall
Shape = tuple[int, int, int]
"""(rows of x, outputs, inputs)."""


class Products:
    """The ways of one device. A rows count that is not in the table takes the next larger one's way. `even`: no table,
    but one way for any number of rows, so that a row's bits do not depend on those beside it. `gated`: of the products
    whose outputs are gates, and what they gate."""

    def __init__(
        self, table: Mapping[Shape, Way], gated: Mapping[Shape, Gated | None] | None = None, *, even: bool = False
    ) -> None:
        self.even = even
        self._gated = GatedProducts(gated or {})
        self._table = dict(table)
        self._rows: dict[tuple[int, int], list[int]] = {}
        for rows, outputs, inputs in sorted(self._table):
            self._rows.setdefault((outputs, inputs), []).append(rows)

    def way(self, rows: int, outputs: int, inputs: int) -> Way | None:
        """How a product is made; None: by cuBLAS."""
        for known in self._rows.get((outputs, inputs), ()):
            if rows <= known:
                return self._table[known, outputs, inputs]
        return None

    def multiply(self, x: Tensor, weight: Weight, pdl: bool, out: Tensor | None = None) -> Tensor:
        """[R, inputs] -> [R, outputs] of x's type; `out`: where it is to lie."""
        weight = _dense(weight)
        if self.even:
            return multiply_evenly(x, weight, pdl, out)
        way = self.way(x.shape[0], *weight.data.shape)
        if way is not None:
            return multiply(x, weight, way, pdl, out)
        return functional.linear(x, weight.data, weight.bias) if out is None else multiply_into(out, x, weight)

    def multiply_gated(self, x: Tensor, weight: Weight, pdl: bool, *, gelu: bool) -> Tensor | None:
        """[R, inputs] -> [R, outputs / 2] = activation(x @ first half.T) * (x @ second half.T) by one kernel; None: a
        product and an activation are the faster way, or the only one."""
        weight = _dense(weight)
        if self.even or weight.bias is not None:
            return None
        way = self._gated.way(x.shape[0], *weight.data.shape)
        return None if way is None else multiply_gated(x, weight.data, way, pdl, gelu=gelu)


def multiply_into(out: Tensor, x: Tensor, weight: Weight) -> Tensor:
    """The product by cuBLAS, into `out` [R, outputs]."""
    dense = _dense(weight)
    if dense.bias is None:
        return torch.mm(x, dense.data.T, out=out)
    return torch.addmm(dense.bias, x, dense.data.T, out=out)


def multiply_onto(residual: Tensor, x: Tensor, weight: Weight) -> None:
    """The product by cuBLAS, added to `residual` [R, outputs]: rounded once, with it; a bias comes after that."""
    dense = _dense(weight)
    torch.addmm(residual, x, dense.data.T, out=residual)
    if dense.bias is not None:
        residual.add_(dense.bias)


def multiply_evenly(x: Tensor, weight: DenseWeight, pdl: bool, out: Tensor | None = None) -> Tensor:
    """The product by tiles of one size, summed in one order."""
    outputs, inputs = weight.data.shape
    rows = x.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    # The greatest power of two that divides the inner dimension, within what a tile may have.
    block_k = min(64, inputs & -inputs)
    even_product_kernel[(-(-rows // _EVEN_ROWS), -(-outputs // _EVEN_OUTPUTS))](
        x,
        weight.data,
        weight.data if weight.bias is None else weight.bias,
        y,
        rows,
        outputs,
        INPUTS=inputs,
        BLOCK_M=_EVEN_ROWS,
        BLOCK_N=_EVEN_OUTPUTS,
        BLOCK_K=block_k,
        BIASED=weight.bias is not None,
        STAGES=4,
        **options(pdl, num_warps=4),
    )
    return y


def multiply(x: Tensor, weight: DenseWeight, way: Way, pdl: bool, out: Tensor | None = None) -> Tensor:
    """The product by the given way."""
    outputs, inputs = weight.data.shape
    rows = x.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    bias = weight.data if weight.bias is None else weight.bias
    biased = weight.bias is not None
    if isinstance(way, Gemv):
        gemv_kernel[(-(-outputs // way.block_n),)](
            x,
            weight.data,
            bias,
            y,
            outputs,
            INPUTS=inputs,
            M=rows,
            BLOCK_N=way.block_n,
            BLOCK_K=way.block_k,
            BIASED=biased,
            **options(pdl, num_warps=way.warps),
        )
        return y
    kernel = tall_product_kernel if way.shares == 1 else split_product_kernel
    shares = {} if way.shares == 1 else {"SHARES": way.shares}
    kernel[(-(-outputs // way.block_n),)](
        x,
        weight.data,
        bias,
        y,
        rows,
        outputs,
        INPUTS=inputs,
        M=way.columns,
        BLOCK_N=way.block_n,
        BLOCK_K=way.block_k,
        BIASED=biased,
        STAGES=way.stages,
        **shares,
        **options(pdl, num_warps=way.warps),
    )
    return y


def _dense(weight: Weight) -> DenseWeight:
    if not isinstance(weight, DenseWeight):
        raise TypeError("only dense weights have a product on this device")
    return weight

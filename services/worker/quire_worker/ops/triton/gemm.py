"""Linear layers: y = x @ weight.T with the kernel config that was measured to be the fastest for the shape.

A kernel config is a value. The table from shapes to configs is data (see gemm_configs), made by
`bench/gpu/choose_products.py`. cuBLAS computes shapes that no table has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

from quire_worker.ops.triton.gated_gemm import GatedGemmConfig, GatedGemmConfigs, gated_gemm
from quire_worker.ops.triton.kernels.batch_invariant_gemm import batch_invariant_gemm_kernel
from quire_worker.ops.triton.kernels.gemm import gemv_kernel, split_k_gemm_kernel, tall_gemm_kernel
from quire_worker.ops.triton.launch import empty_like_rows, options
from quire_worker.ops.weight import DenseWeight, Weight, as_dense


@dataclass(frozen=True, slots=True)
class Gemv:
    """The config of a kernel that sums over the rows of the weight, for one or two rows of x."""

    block_n: int
    block_k: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tall:
    """The config of a kernel with matrix instructions, for up to `columns` rows of x. The weight is the tall
    operand."""

    columns: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    shares: int = 1
    """More than 1: a turn takes this many tiles of the inner dimension, which are summed at the end. A warp may have
    several of them."""


_EVEN_ROWS, _EVEN_OUTPUTS = 64, 64
_GEMV_MAX_ROWS = 2
GemmConfig = Gemv | Tall
GatedActivation = Literal["silu", "gelu_tanh"]
Shape = tuple[int, int, int]
"""(rows of x, outputs, inputs)."""


class GemmConfigs:
    """The kernel configs of one device. A number of rows that is not in the table uses the config of the next larger
    one. `batch_invariant`: all numbers of rows use one kernel without a table, so that a row's bits do not depend on
    the other rows. `gated`: configs of linear layers whose outputs are gates and the values that they multiply."""

    def __init__(
        self,
        table: Mapping[Shape, GemmConfig],
        gated: Mapping[Shape, GatedGemmConfig | None] | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.batch_invariant = batch_invariant
        self._gated = GatedGemmConfigs(gated or {})
        self._table = dict(table)
        self._rows: dict[tuple[int, int], list[int]] = {}
        for rows, outputs, inputs in sorted(self._table):
            self._rows.setdefault((outputs, inputs), []).append(rows)

    def config_for(self, rows: int, outputs: int, inputs: int) -> GemmConfig | None:
        """Return the kernel config of a linear layer, that of the least number of rows in the table that is not below
        `rows`. None: the table has none, and cuBLAS computes the layer."""
        for known in self._rows.get((outputs, inputs), ()):
            if rows <= known:
                return self._table[known, outputs, inputs]
        return None

    def gated_config_for(self, rows: int, outputs: int, inputs: int) -> GatedGemmConfig | GemmConfig | None:
        """Return the config of the kernel that computes the gate and up projections, without a bias, and their
        activation. `outputs` counts both projections. Returns None if the configs are batch-invariant, or if neither
        table has a config for the shape."""
        if self.batch_invariant:
            return None
        return self._gated.config_for(rows, outputs, inputs) or self.config_for(rows, outputs, inputs)

    def gemm(self, x: Tensor, weight: Weight, pdl: bool, out: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T + bias, [R, outputs] of x's type, from x [R, inputs]. The kernel is the batch-invariant
        one, the one that the table names, or else cuBLAS's. The result is written to `out` if given. `pdl`: see
        launch.py. Raises TypeError unless the weight is dense."""
        weight = as_dense(weight)
        if self.batch_invariant:
            return batch_invariant_gemm(x, weight, pdl, out)
        config = self.config_for(x.shape[0], *weight.data.shape)
        if config is not None:
            return gemm(x, weight, config, pdl, out)
        return functional.linear(x, weight.data, weight.bias) if out is None else gemm_into(out, x, weight)

    def gated_gemm(self, x: Tensor, weight: Weight, pdl: bool, *, gelu: bool) -> Tensor | None:
        """Compute [R, outputs / 2] = activation(x @ first half.T) * (x @ second half.T) in one kernel, from x [R,
        inputs]. The activation is gelu in its tanh form with `gelu`, else silu. `pdl`: see launch.py. Raises TypeError
        unless the weight is dense. Returns None if the caller must run a GEMM and an activation: with a bias, or if
        `gated_config_for` has no config."""
        weight = as_dense(weight)
        config = self.gated_config_for(x.shape[0], *weight.data.shape)
        if config is None or weight.bias is not None:
            return None
        if isinstance(config, GatedGemmConfig):
            return gated_gemm(x, weight.data, config, pdl, gelu=gelu)
        return gemm(x, weight, config, pdl, activation="gelu_tanh" if gelu else "silu")


def gemm_into(out: Tensor, x: Tensor, weight: Weight) -> Tensor:
    """Compute x @ weight.T + bias by cuBLAS into `out` [R, outputs], and return it. Raises TypeError unless the weight
    is dense."""
    dense = as_dense(weight)
    if dense.bias is None:
        return torch.mm(x, dense.data.T, out=out)
    return torch.addmm(dense.bias, x, dense.data.T, out=out)


def gemm_add(residual: Tensor, x: Tensor, weight: Weight) -> None:
    """Add x @ weight.T to `residual` [R, outputs] in place by cuBLAS, and round once, after the sum. A bias is added
    after that, and rounds again. Raises TypeError unless the weight is dense."""
    dense = as_dense(weight)
    torch.addmm(residual, x, dense.data.T, out=residual)
    if dense.bias is not None:
        residual.add_(dense.bias)


def batch_invariant_gemm(x: Tensor, weight: DenseWeight, pdl: bool, out: Tensor | None = None) -> Tensor:
    """Compute x [R, inputs] @ weight.T + bias by one kernel that sums in the same order for every R. So a row's bits do
    not depend on the other rows. The result [R, outputs] is written to `out` if given. `pdl`: see launch.py."""
    outputs, inputs = weight.data.shape
    rows = x.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    # The greatest power of two that divides the inner dimension, up to the limit of a tile.
    block_k = min(64, inputs & -inputs)
    batch_invariant_gemm_kernel[(-(-rows // _EVEN_ROWS), -(-outputs // _EVEN_OUTPUTS))](
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


def gemm(
    x: Tensor,
    weight: DenseWeight,
    config: GemmConfig,
    pdl: bool,
    out: Tensor | None = None,
    *,
    activation: GatedActivation | None = None,
) -> Tensor:
    """Compute x [R, inputs] @ weight.T + bias with the given kernel config, and return [R, outputs]. With an
    activation, the outputs are gates and then ups, and the result is activation(gates) * ups, [R, outputs / 2]. The
    result is written to `out` if given. `pdl`: see launch.py. Raises ValueError if R is more than 2 for a Gemv, or more
    than `columns` for a Tall, and for an activation with a bias."""
    outputs, inputs = weight.data.shape
    rows = x.shape[0]
    if rows > (_GEMV_MAX_ROWS if isinstance(config, Gemv) else config.columns):
        raise ValueError(f"{rows} rows are too many for {config}")
    if activation is not None and weight.bias is not None:
        raise ValueError("the kernel adds no bias to gates")
    y = empty_like_rows(x, outputs if activation is None else outputs // 2) if out is None else out
    constants: dict[str, Any] = {
        "INPUTS": inputs,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BIASED": weight.bias is not None,
        "GATED": activation is not None,
        "GELU": activation == "gelu_tanh",
        **options(pdl, num_warps=config.warps),
    }
    tensors = x, weight.data, weight.data if weight.bias is None else weight.bias, y
    grid = (-(-outputs // config.block_n),)
    if isinstance(config, Gemv):
        gemv_kernel[grid](*tensors, outputs, M=rows, **constants)
        return y
    constants |= {"M": config.columns, "STAGES": config.stages}
    if config.shares == 1:
        tall_gemm_kernel[grid](*tensors, rows, outputs, **constants)
    else:
        split_k_gemm_kernel[grid](*tensors, rows, outputs, SHARES=config.shares, **constants)
    return y

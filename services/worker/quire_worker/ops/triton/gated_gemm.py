"""Gated linear layers with many rows: activation(x @ gates.T) * (x @ ups.T) in one kernel, for the shapes at which one
kernel was measured to be faster. Those with few rows are in gemm.py.

As with plain linear layers, a kernel config is a value. The table from shapes to configs is data, made by
`bench/gpu/choose_gated.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire_worker.ops.triton.kernels.gated_gemm import gated_gemm_kernel
from quire_worker.ops.triton.launch import empty_like_rows, options


@dataclass(frozen=True, slots=True)
class GatedGemmConfig:
    """A kernel config. A tile has `block_m` rows, and `block_n` gates with the values that they multiply. `group` tiles
    of rows run together. `programs` is the number of programs."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int
    programs: int


class GatedGemmConfigs:
    """The kernel configs of one device. A number of rows uses the config of the largest number in the table that is not
    above it, if there is one, and that entry has a config."""

    def __init__(self, table: Mapping[tuple[int, int, int], GatedGemmConfig | None]) -> None:
        """The table's keys are (rows, outputs, inputs)."""
        self._configs: dict[tuple[int, int], list[tuple[int, GatedGemmConfig | None]]] = {}
        for (rows, outputs, inputs), config in sorted(table.items(), key=lambda entry: entry[0], reverse=True):
            self._configs.setdefault((outputs, inputs), []).append((rows, config))

    def config_for(self, rows: int, outputs: int, inputs: int) -> GatedGemmConfig | None:
        """Return the config of the largest number of rows in the table that is not above `rows`, for a weight [outputs,
        inputs]; None if it has none. The outputs are the gates and the ups, one half each."""
        for least, config in self._configs.get((outputs, inputs), ()):
            if least <= rows:
                return config
        return None


def gated_gemm(
    x: Tensor, weight: Tensor, config: GatedGemmConfig, pdl: bool, *, gelu: bool = False, out: Tensor | None = None
) -> Tensor:
    """Compute activation(x @ gates.T) * (x @ ups.T), [R, I] of x's type, from x [R, inputs] and weight [2 I, inputs]
    (gates, then ups). The activation is silu, or gelu in its tanh form with `gelu`. The result is written to `out` if
    given. Rows of x, of the weight and of the result must begin at multiples of 16 bytes; Triton raises AssertionError
    otherwise. `pdl`: see launch.py."""
    (rows, inputs), inner = x.shape, weight.shape[0] // 2
    y = empty_like_rows(x, inner) if out is None else out
    tiles = -(-rows // config.block_m) * -(-inner // config.block_n)
    programs = min(config.programs, tiles)
    gated_gemm_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight.view(2, inner, inputs), [2, config.block_n, config.block_k]),
        TensorDescriptor.from_tensor(y, [config.block_m, config.block_n]),
        rows,
        INNER=inner,
        INPUTS=inputs,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        PROGRAMS=config.programs,
        STAGES=config.stages,
        GELU=gelu,
        **options(pdl, num_warps=config.warps),
    )
    return y

"""Gated products: activation(x @ gates.T) * (x @ ups.T) in one kernel, where that was measured to be faster.

As with products, a way is a value and the table that maps shapes to ways is data, made by `bench/gpu/choose_gated.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire_worker.ops.triton.kernels.gated_product import gated_product_kernel
from quire_worker.ops.triton.launch import empty_like_rows, options


@dataclass(frozen=True, slots=True)
class Gated:
    """Tiles of `block_m` rows and `block_n` gates with what they gate, `group` tiles of rows together, by so many
    programs."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int
    programs: int


class GatedProducts:
    """The ways of one device. A number of rows takes the way of the largest in the table that is not above it; where
    there is none, or that one has no way, product and activation are apart."""

    def __init__(self, table: Mapping[tuple[int, int, int], Gated | None]) -> None:
        """By (rows, outputs, inputs)."""
        self._ways: dict[tuple[int, int], list[tuple[int, Gated | None]]] = {}
        for (rows, outputs, inputs), way in sorted(table.items(), key=lambda entry: entry[0], reverse=True):
            self._ways.setdefault((outputs, inputs), []).append((rows, way))

    def way(self, rows: int, outputs: int, inputs: int) -> Gated | None:
        """How one of a weight [outputs, inputs] is made, gates and ups being half of the outputs each."""
        for least, way in self._ways.get((outputs, inputs), ()):
            if least <= rows:
                return way
        return None


def multiply_gated(
    x: Tensor, weight: Tensor, way: Gated, pdl: bool, *, gelu: bool = False, out: Tensor | None = None
) -> Tensor:
    """x [R, inputs], weight [2 I, inputs] (gates, then ups) -> [R, I] of x's type; `out`: where it is to lie. Rows of
    both must begin at multiples of 16 bytes."""
    (rows, inputs), inner = x.shape, weight.shape[0] // 2
    y = empty_like_rows(x, inner) if out is None else out
    tiles = -(-rows // way.block_m) * -(-inner // way.block_n)
    programs = min(way.programs, tiles)
    gated_product_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [way.block_m, way.block_k]),
        TensorDescriptor.from_tensor(weight.view(2, inner, inputs), [2, way.block_n, way.block_k]),
        TensorDescriptor.from_tensor(y, [way.block_m, way.block_n]),
        rows,
        INNER=inner,
        INPUTS=inputs,
        BLOCK_M=way.block_m,
        BLOCK_N=way.block_n,
        BLOCK_K=way.block_k,
        GROUP=way.group,
        PROGRAMS=way.programs,
        STAGES=way.stages,
        GELU=gelu,
        **options(pdl, num_warps=way.warps),
    )
    return y

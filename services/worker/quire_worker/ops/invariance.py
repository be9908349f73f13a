"""Measures from how many rows on a row of a GEMM has the same bits for any number of rows, on this machine and with
this number of threads.

Libraries choose kernels by shape, and kernels sum in different orders. On one CPU a row keeps its bits from four rows
on, on another from sixteen. With several threads, some libraries split the inner dimension of large GEMMs by the number
of rows. So this module measures it, in a fraction of a second at start. Then the results of this process are exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

ROW_TILES = (4, 8, 16, 32)
_MOST_ROWS = 256
_GEMM_ROWS = (16, 48, 128)
_MOST_GEMM_ROWS = 1024
_MOST_MULTIPLICATIONS = 1 << 35
"""Limits the cost of measuring one GEMM; only vocabularies of wide models come near this limit."""


def attention_row_tile(head_dim: int, tile: int, kv_heads: int) -> int | None:
    """Measure the least row tile (4, 8, 16 or 32): with a multiple of so many query rows, rows of both attention GEMMs
    keep their bits.

    The test multiplies random matrices, and compares products of some rows and items with those of all. Returns None if
    no number in ROW_TILES passes.
    """
    items = 3 * kv_heads
    keys, values = _random(items, 2, tile, head_dim, seed=1).unbind(1)
    query, weights = _random(items, _MOST_ROWS, head_dim, seed=2), _random(items, _MOST_ROWS, tile, seed=3).abs_()
    scores, sums = torch.bmm(query, keys.transpose(1, 2)), torch.bmm(weights, values)
    for row_tile in ROW_TILES:
        parts = [
            (slice(0, count), slice(first, first + rows))
            for rows in (row_tile, 2 * row_tile, 3 * row_tile, 64)
            for count in (1, 2, kv_heads, items)
            for first in (0, row_tile)
        ]
        if all(
            torch.equal(torch.bmm(query[part].contiguous(), keys[part[0]].transpose(1, 2)), scores[part])
            and torch.equal(torch.bmm(weights[part].contiguous(), values[part[0]]), sums[part])
            for part in parts
        ):
            return row_tile
    return None


def gemm_depends_on_rows(outputs: int, inputs: int) -> bool:
    """Whether rows of x @ weight.T have other bits if the number of rows changes from one multiple of 16 to another.

    The test multiplies a random x of 256 to 1024 rows, fewer for a large weight, with a random weight, then only x's
    first 16, 48 and 128 rows. A single torch thread never splits the inner dimension, so then the result is False
    without a test.
    """
    if torch.get_num_threads() == 1:
        return False
    rows = min(_MOST_GEMM_ROWS, max(_MOST_ROWS, _MOST_MULTIPLICATIONS // (outputs * inputs) // 16 * 16))
    weight, x = _random(outputs, inputs, seed=4), _random(rows, inputs, seed=5)
    whole = functional.linear(x, weight)
    return not all(torch.equal(functional.linear(x[:part], weight), whole[:part]) for part in _GEMM_ROWS)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

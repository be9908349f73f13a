"""Products of rows with weights on the CPU: kernels that read weights as they are stored and add in one fixed order.

Weights lie in tiles of LANES outputs (see tiled_weight.py). Each lane is one output: it adds the inputs one after the
other, those of the first and of the second half of each block of 32 in a sum of its own. So the bits of a row's results
depend on that row and the weights alone, whatever the number of rows, and a tile may be computed by any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numba
import numpy as np

from quire_worker.arrays import Float32, Int8, Int64, UInt8, UInt16
from quire_worker.ops.kernel_team import array_at, compile_job
from quire_worker.ops.simd import (
    LANES,
    Vector,
    add,
    fma,
    kernel,
    load,
    load_bfloat16,
    load_high_nibbles,
    load_int8,
    load_low_nibbles,
    multiply,
    prefetch,
    spread,
    spread_from,
    store,
)

BLOCK: Final = 32
"""Inputs."""
_HALF: Final = 16
_NO_SCALES: Final = np.zeros(0, np.float32)
_LINE_BYTES: Final = 64
_ZERO: Final = np.float32(0.0)
_BLOCKS_AHEAD: Final = 8
"""With few rows the processor waits for weights: it is told early which are to come."""
_UNPACKED_ROWS: Final = 32
"""From so many rows on a tile is unpacked once for all."""
Scales = Float32 | UInt16
"""uint16: float16."""
PRODUCT_WORDS: Final = ("x", "rows", "data", "scale", "offset", "blocks", "bias", "out", "step", "place")
"""Addresses, and the numbers of `_make_product`."""
Unpack = Callable[[Any, Scales, Scales, int, int], tuple[Vector, Vector]]
"""(data, scale, offset, block, k) -> the weights of inputs k and k + 16 of a block. Blocks are counted over all
tiles."""


@kernel
def nibbles(data: UInt8, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """Four-bit integers; a scale and an offset for each block."""
    at = (block * _HALF + k) * LANES
    s, o = load(scale, block * LANES), load(offset, block * LANES)
    return fma(load_low_nibbles(data, at), s, o), fma(load_high_nibbles(data, at), s, o)


@kernel
def half_block_nibbles(data: UInt8, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """The same with a scale and an offset for each half of a block."""
    at, first, second = (block * _HALF + k) * LANES, 2 * block * LANES, (2 * block + 1) * LANES
    low, high = load_low_nibbles(data, at), load_high_nibbles(data, at)
    return fma(low, load(scale, first), load(offset, first)), fma(high, load(scale, second), load(offset, second))


@kernel
def bytes_with_offset(data: Int8, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """Eight-bit integers; a scale and an offset for each block."""
    at = (block * BLOCK + k) * LANES
    s, o = load(scale, block * LANES), load(offset, block * LANES)
    return fma(load_int8(data, at), s, o), fma(load_int8(data, at + _HALF * LANES), s, o)


@kernel
def scaled_bytes(data: Int8, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """Eight-bit integers and a scale for each block."""
    at, s = (block * BLOCK + k) * LANES, load(scale, block * LANES)
    return multiply(load_int8(data, at), s), multiply(load_int8(data, at + _HALF * LANES), s)


@kernel
def half_block_bytes(data: Int8, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """The same with a scale for each half of a block."""
    at, first, second = (block * BLOCK + k) * LANES, 2 * block * LANES, (2 * block + 1) * LANES
    low, high = load_int8(data, at), load_int8(data, at + _HALF * LANES)
    return multiply(low, load(scale, first)), multiply(high, load(scale, second))


@kernel
def bfloat16(data: UInt16, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    at = (block * BLOCK + k) * LANES
    return load_bfloat16(data, at), load_bfloat16(data, at + _HALF * LANES)


@kernel
def floats(data: Float32 | UInt16, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """float32, or float16 as uint16."""
    at = (block * BLOCK + k) * LANES
    return load(data, at), load(data, at + _HALF * LANES)


STORAGES: Final[MappingProxyType[str, Unpack]] = MappingProxyType(
    {
        each.__name__: each
        for each in (
            nibbles,
            half_block_nibbles,
            bytes_with_offset,
            scaled_bytes,
            half_block_bytes,
            bfloat16,
            floats,
        )
    }
)
"""The ways in which a tile is stored, by name."""


def _make_prefetch(elements: int, line: int) -> Any:
    """`elements`: of `data` in a block. `line`: in a cache line."""

    @kernel
    def prefetch_block(data: Any, block: int) -> None:
        """Begin to load what is needed some blocks after this one."""
        begin = (block + _BLOCKS_AHEAD) * elements
        for at in range(begin, begin + elements, line):
            prefetch(data, at)

    return prefetch_block


@kernel
def _nothing(data: Any, block: int) -> None:
    """What is in the cache needs no prefetch."""


def _for_one_row(unpack: Unpack, prefetch_block: Any) -> Any:
    @kernel
    def product(x: Float32, at: int, data: Any, scale: Scales, offset: Scales, first: int, blocks: int) -> Vector:
        """The sums of one row, whose inputs begin at `at`, with a tile whose first block is `first`."""
        a = b = spread(_ZERO)
        for block in range(blocks):
            prefetch_block(data, first + block)
            for k in range(_HALF):
                w, v = unpack(data, scale, offset, first + block, k)
                i = at + block * BLOCK + k
                a, b = fma(spread_from(x, i), w, a), fma(spread_from(x, i + _HALF), v, b)
        return add(a, b)

    return product


def _for_four_rows(unpack: Unpack, prefetch_block: Any) -> Any:
    @kernel
    def product(
        x: Float32, at: int, size: int, data: Any, scale: Scales, offset: Scales, first: int, blocks: int
    ) -> tuple[Vector, Vector, Vector, Vector]:
        """The same of four rows of `size` inputs each."""
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = spread(_ZERO)
        for block in range(blocks):
            prefetch_block(data, first + block)
            for k in range(_HALF):
                w, v = unpack(data, scale, offset, first + block, k)
                i = at + block * BLOCK + k
                a0, b0 = fma(spread_from(x, i), w, a0), fma(spread_from(x, i + _HALF), v, b0)
                i += size
                a1, b1 = fma(spread_from(x, i), w, a1), fma(spread_from(x, i + _HALF), v, b1)
                i += size
                a2, b2 = fma(spread_from(x, i), w, a2), fma(spread_from(x, i + _HALF), v, b2)
                i += size
                a3, b3 = fma(spread_from(x, i), w, a3), fma(spread_from(x, i + _HALF), v, b3)
        return add(a0, b0), add(a1, b1), add(a2, b2), add(a3, b3)

    return product


@kernel
def store_four(out: Float32, at: int, step: int, sums: tuple[Vector, Vector, Vector, Vector], bias: Vector) -> None:
    """The sums of four rows and the bias, to rows of `out` that are `step` apart."""
    store(out, at, add(sums[0], bias))
    store(out, at + step, add(sums[1], bias))
    store(out, at + 2 * step, add(sums[2], bias))
    store(out, at + 3 * step, add(sums[3], bias))


@cache
def make_look_up(storage: str) -> Callable[..., None]:
    """The kernel that looks up outputs by number, as an embedding does: (first row, last row, output [rows] int64,
    data, scale, offset, blocks of a tile, out [rows, step], step)."""
    unpack = STORAGES[storage]

    @kernel
    def look_up(
        begin: int,
        end: int,
        output: Int64,
        data: Any,
        scale: Scales,
        offset: Scales,
        blocks: int,
        out: Float32,
        step: int,
    ) -> None:
        lanes = np.empty(2 * LANES, np.float32)
        for row in range(begin, end):
            tile, lane = output[row] // LANES, output[row] % LANES
            for i in range(step):
                block, k = i // BLOCK, i % BLOCK
                if k < _HALF:
                    w, v = unpack(data, scale, offset, tile * blocks + block, k)
                    store(lanes, 0, w)
                    out[row * step + i] = lanes[lane]
                    store(lanes, LANES, v)
                    if i + _HALF < step:
                        out[row * step + i + _HALF] = lanes[LANES + lane]

    return look_up


@cache
def compile_product(storage: str, number: np.dtype[Any], scale_number: np.dtype[Any]) -> int:
    """The address of the kernel, a job of a kernel team over tiles, for a storage with data and scales of such numbers.

    Its words are the fields of PRODUCT_WORDS.
    """
    product = _make_product(storage, number)
    floats, numbers, scales = (numba.from_dtype(np.dtype(each)) for each in (np.float32, number, scale_number))

    def job(begin: int, end: int, words: Any) -> None:
        x, bias, out = array_at(words[0], floats), array_at(words[6], floats), array_at(words[7], floats)
        data, scale, offset = array_at(words[2], numbers), array_at(words[3], scales), array_at(words[4], scales)
        product(begin, end, x, words[1], data, scale, offset, words[5], bias, out, words[8], words[9])

    return compile_job(job)


def _make_product(storage: str, number: np.dtype[Any]) -> Callable[..., None]:
    """The kernel for a storage with data of such numbers: (first tile, last tile, x [rows, blocks * BLOCK], rows, data,
    scale, offset, blocks of a tile, bias [tiles * LANES], out [rows, step], step, place of the first tile in a row of
    `out`)."""
    unpack = STORAGES[storage]
    elements = LANES * (BLOCK // 2 if "nibbles" in storage else BLOCK)
    prefetch_block = _make_prefetch(elements, _LINE_BYTES // np.dtype(number).itemsize)
    one_row, four_rows = _for_one_row(unpack, prefetch_block), _for_four_rows(unpack, prefetch_block)
    four_unpacked_rows = _for_four_rows(floats, _nothing)

    @kernel
    def product(
        begin: int,
        end: int,
        x: Float32,
        rows: int,
        data: Any,
        scale: Scales,
        offset: Scales,
        blocks: int,
        bias: Float32,
        out: Float32,
        step: int,
        place: int,
    ) -> None:
        size = blocks * BLOCK
        unpacked = np.empty(size * LANES if rows >= _UNPACKED_ROWS else 0, np.float32)
        for tile in range(begin, end):
            b, first, row, at = load(bias, tile * LANES), tile * blocks, 0, place + tile * LANES
            if rows >= _UNPACKED_ROWS:
                for block in range(blocks):
                    prefetch_block(data, first + block)
                    for k in range(_HALF):
                        w, v = unpack(data, scale, offset, first + block, k)
                        store(unpacked, (block * BLOCK + k) * LANES, w)
                        store(unpacked, (block * BLOCK + k + _HALF) * LANES, v)
                while row + 4 <= rows:
                    sums = four_unpacked_rows(x, row * size, size, unpacked, _NO_SCALES, _NO_SCALES, 0, blocks)
                    store_four(out, row * step + at, step, sums, b)
                    row += 4
            while row + 4 <= rows:
                sums = four_rows(x, row * size, size, data, scale, offset, first, blocks)
                store_four(out, row * step + at, step, sums, b)
                row += 4
            while row < rows:
                s0 = one_row(x, row * size, data, scale, offset, first, blocks)
                store(out, row * step + at, add(s0, b))
                row += 1

    return product

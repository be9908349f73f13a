"""Linear layers on the CPU: GEMM kernels that read weights in their stored format and sum in one fixed order.

Weights lie in tiles of LANES outputs (see tile_weight.py). Each SIMD lane computes one output. It adds the inputs in
order, in two sums: one for the first 16 inputs of each block of 32, one for the last 16. So a row's bits depend only
on that row and the weights, not on the number of rows. Any thread may compute a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numba
import numpy as np

from quire_worker.arrays import Float32, Int8, UInt8, UInt16
from quire_worker.ops.cpu.job import (
    FLOAT_BYTES,
    Arguments,
    array_at,
    call_job,
    compile_job,
    float_of,
    floats_at,
    ints_at,
)
from quire_worker.ops.cpu.microkernel import make_microkernel
from quire_worker.ops.cpu.simd import (
    HAS_AVX512,
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
_LINE_BYTES: Final = 64
_ZERO: Final = np.float32(0.0)
_BLOCKS_AHEAD: Final = 8
"""With few rows the processor waits for weights, so they are prefetched."""
_UNPACKED_ROWS: Final = 5
"""From this many rows on, weights are unpacked once for many rows."""
_ROWS_AT_ONCE: Final = 128
_BLOCKS_AT_ONCE: Final = 12
"""Unpacked weights of so many blocks fit in the first-level cache, the inputs of all rows in the second-level one."""
_GROUP, TILES = (8, 2) if HAS_AVX512 else (4, 1)
"""Rows and tiles of a micro-kernel: as many sums as the registers hold, 32 of 16 floats or 16 of 8 floats."""
_ROW_SUMS: Final = TILES * LANES
_HALF_WEIGHTS: Final = _BLOCKS_AT_ONCE * _HALF * _ROW_SUMS
_HALF_SUMS: Final = _ROWS_AT_ONCE * _ROW_SUMS
Scales = Float32 | UInt16
"""uint16: the bits of float16."""
LINEAR_ARGUMENTS: Final = (
    "x",
    "rows",
    "data",
    "scale",
    "offset",
    "blocks",
    "bias",
    "out",
    "out_stride",
    "first_output",
    "add_products",
)
"""Arguments of a compiled job, one int64 each, in this order: arrays by address, the rest by value."""
StoredTiles = tuple[Any, Scales, Scales, int]
"""Data, scale and offset of all tiles, and the blocks of a tile."""
Output = tuple[Float32, int, int]
"""The result [rows, step], step, and the place of the first tile's outputs in a row."""
Unpack = Callable[[Any, Scales, Scales, int, int], tuple[Vector, Vector]]
"""(data, scale, offset, block, k) -> LANES weights of input k and of input k + 16 in the block. `block` counts over
all tiles."""


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


def _for_one_row(unpack: Unpack, prefetch_block: Any) -> Any:
    @kernel
    def sums(x: Float32, at: int, data: Any, scale: Scales, offset: Scales, first: int, blocks: int) -> Vector:
        """The sums of one row, whose inputs begin at `at`, with a tile whose first block is `first`."""
        a = b = spread(_ZERO)
        for block in range(blocks):
            prefetch_block(data, first + block)
            for k in range(_HALF):
                w, v = unpack(data, scale, offset, first + block, k)
                i = at + block * BLOCK + k
                a, b = fma(spread_from(x, i), w, a), fma(spread_from(x, i + _HALF), v, b)
        return add(a, b)

    return sums


def _for_four_rows(unpack: Unpack, prefetch_block: Any) -> Any:
    @kernel
    def sums(
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

    return sums


@kernel
def store_four(out: Float32, at: int, step: int, sums: tuple[Vector, Vector, Vector, Vector], bias: Vector) -> None:
    """The sums of four rows and the bias, to rows of `out` that are `step` apart."""
    store(out, at, add(sums[0], bias))
    store(out, at + step, add(sums[1], bias))
    store(out, at + 2 * step, add(sums[2], bias))
    store(out, at + 3 * step, add(sums[3], bias))


@cache
def compile_embedding(storage: str, number: np.dtype[Any], scale_number: np.dtype[Any]) -> int:
    """The address of the embedding job, over rows, for a storage with data and scales of such numbers.

    It writes the weights of one output, a token, times a factor to each row. Its arguments: token [rows], data, scale,
    offset, blocks of a tile, out [rows, inputs], inputs, factor.
    """
    unpack = STORAGES[storage]
    numbers, scales = numba.from_dtype(number), numba.from_dtype(scale_number)

    def embed(begin: int, end: int, arguments: Arguments) -> None:
        token, out, inputs, blocks = ints_at(arguments[0]), floats_at(arguments[5]), arguments[6], arguments[4]
        data = array_at(arguments[1], numbers)
        scale, offset = array_at(arguments[2], scales), array_at(arguments[3], scales)
        factor, lanes = float_of(arguments[7]), np.empty(2 * LANES, np.float32)
        for row in range(begin, end):
            tile, lane = token[row] // LANES, token[row] % LANES
            for i in range(inputs):
                block, k = i // BLOCK, i % BLOCK
                if k < _HALF:
                    w, v = unpack(data, scale, offset, tile * blocks + block, k)
                    store(lanes, 0, w)
                    out[row * inputs + i] = factor * lanes[lane]
                    store(lanes, LANES, v)
                    if i + _HALF < inputs:
                        out[row * inputs + i + _HALF] = factor * lanes[LANES + lane]

    return compile_job(embed, f"embedding of {storage}, {number} with {scale_number}")


@cache
def compile_linear(storage: str, number: np.dtype[Any], scale_number: np.dtype[Any]) -> int:
    """The address of the linear job, over tiles, for a storage with data and scales of such numbers.

    Its arguments are LINEAR_ARGUMENTS.
    """
    linear = _make_linear(storage, number)
    numbers, scales = numba.from_dtype(number), numba.from_dtype(scale_number)

    def job(begin: int, end: int, arguments: Arguments) -> None:
        bias, out = floats_at(arguments[6]), floats_at(arguments[7])
        data = array_at(arguments[2], numbers)
        scale, offset = array_at(arguments[3], scales), array_at(arguments[4], scales)
        weight = data, scale, offset, arguments[5]
        output = out, arguments[8], arguments[9]
        linear(begin, end, arguments[0], arguments[1], weight, bias, output, arguments[10])

    return compile_job(job, f"linear of {storage}, {number} with {scale_number}")


def _make_linear(storage: str, number: np.dtype[Any]) -> Callable[..., None]:
    """The linear kernel for a storage with data of such numbers: (first tile, last tile, address of x [rows, blocks *
    BLOCK], rows, weight, bias [tiles * LANES], out, address of `add_products`)."""
    unpack = STORAGES[storage]
    elements = LANES * (BLOCK // 2 if "nibbles" in storage else BLOCK)
    prefetch_block = _make_prefetch(elements, _LINE_BYTES // np.dtype(number).itemsize)
    one_row, four_rows = _for_one_row(unpack, prefetch_block), _for_four_rows(unpack, prefetch_block)
    many_rows = _make_many_rows(unpack, prefetch_block)

    @kernel
    def linear(
        begin: int, end: int, x_at: int, rows: int, weight: StoredTiles, bias: Float32, out: Output, add_products: int
    ) -> None:
        if rows >= _UNPACKED_ROWS:
            many_rows(begin, end, x_at, rows, weight, bias, out, add_products)
            return
        data, scale, offset, blocks = weight
        result, step, first_output = out
        x, size = floats_at(x_at), blocks * BLOCK
        for tile in range(begin, end):
            b, first, row, at = load(bias, tile * LANES), tile * blocks, 0, first_output + tile * LANES
            while row + 4 <= rows:
                sums = four_rows(x, row * size, size, data, scale, offset, first, blocks)
                store_four(result, row * step + at, step, sums, b)
                row += 4
            while row < rows:
                s0 = one_row(x, row * size, data, scale, offset, first, blocks)
                store(result, row * step + at, add(s0, b))
                row += 1

    return linear


def _make_many_rows(unpack: Unpack, prefetch_block: Any) -> Callable[..., None]:
    """The same as the linear kernel, to the bit, quicker for many rows: weights are unpacked once for _ROWS_AT_ONCE
    rows, TILES tiles and _BLOCKS_AT_ONCE blocks. The sums, the same for each storage, are a job compiled once: see
    `compile_add_products`."""

    @kernel
    def many_rows(
        begin: int, end: int, x: int, rows: int, weight: StoredTiles, bias: Float32, out: Output, add_products: int
    ) -> None:
        data, scale, offset, blocks = weight
        result, step, first_output = out
        size = blocks * BLOCK
        unpacked, sums = np.empty(2 * _HALF_WEIGHTS, np.float32), np.empty(2 * _HALF_SUMS, np.float32)
        given = np.empty(5, np.int64)
        given[1], given[2], given[4] = size, unpacked.ctypes.data, sums.ctypes.data
        for first_row in range(0, rows, _ROWS_AT_ONCE):
            rows_now = min(_ROWS_AT_ONCE, rows - first_row)
            for first_tile in range(begin, end, TILES):
                for at in range(0, rows_now * _ROW_SUMS, LANES):
                    store(sums, at, spread(_ZERO))
                    store(sums, _HALF_SUMS + at, spread(_ZERO))
                for first_block in range(0, blocks, _BLOCKS_AT_ONCE):
                    blocks_now = min(_BLOCKS_AT_ONCE, blocks - first_block)
                    for number in range(TILES):
                        # An odd last tile is computed twice, and stored once.
                        place = min(first_tile + number, end - 1) * blocks + first_block
                        for block in range(blocks_now):
                            prefetch_block(data, place + block)
                            for k in range(_HALF):
                                at = ((block * _HALF + k) * TILES + number) * LANES
                                w, v = unpack(data, scale, offset, place + block, k)
                                store(unpacked, at, w)
                                store(unpacked, _HALF_WEIGHTS + at, v)
                    given[0] = x + (first_row * size + first_block * BLOCK) * FLOAT_BYTES
                    given[3] = blocks_now
                    call_job(add_products, 0, rows_now, given.ctypes.data)
                for number in range(min(TILES, end - first_tile)):
                    tile = first_tile + number
                    b, target = load(bias, tile * LANES), first_row * step + first_output + tile * LANES
                    for row in range(rows_now):
                        at = (row * TILES + number) * LANES
                        store(result, target + row * step, add(add(load(sums, at), load(sums, _HALF_SUMS + at)), b))

    return many_rows


_row_group, _four_rows, _one_row = (make_microkernel(rows, TILES, _HALF, BLOCK) for rows in (_GROUP, 4, 1))


def compile_add_products() -> int:
    """The address of the job, over rows, that a linear job of many rows calls; an argument of it, since addresses
    differ from process to process."""
    return compile_job(_add_products, "add products")


def _add_products(begin: int, end: int, arguments: Arguments) -> None:
    """(x, inputs of a row, weights, blocks, sums): add the products of rows begin..end with unpacked weights [2,
    blocks, 16, TILES, LANES] to their sums [2, rows, TILES, LANES], for each half of the blocks."""
    x, size, weights, blocks = floats_at(arguments[0]), arguments[1], floats_at(arguments[2]), arguments[3]
    sums = floats_at(arguments[4])
    for half in range(2):
        row, x_at, w_at, s_at = begin, half * _HALF, half * _HALF_WEIGHTS, half * _HALF_SUMS
        while row + _GROUP <= end:
            _row_group(x, x_at + row * size, size, weights, w_at, blocks, sums, s_at + row * _ROW_SUMS)
            row += _GROUP
        if row + 4 <= end:
            _four_rows(x, x_at + row * size, size, weights, w_at, blocks, sums, s_at + row * _ROW_SUMS)
            row += 4
        while row < end:
            _one_row(x, x_at + row * size, size, weights, w_at, blocks, sums, s_at + row * _ROW_SUMS)
            row += 1

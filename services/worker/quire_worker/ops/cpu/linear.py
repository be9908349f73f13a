"""Linear layers on the CPU: GEMM kernels that read weights in their stored format and sum in one fixed order.

Weights lie in tiles of LANES outputs (see tile_weight.py). Each SIMD lane computes one output. The lane adds the
products in the order of the inputs, in two sums: one for the first 16 inputs of each block of 32, one for the last 16.
So a row's bits depend only on that row and the weights, not on the number of rows. Any thread may compute a tile. A
range begin..end of tiles or rows excludes `end`.
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
    call_job_kernel,
    compile_job_kernel,
    float_from_bits,
    floats_at,
    ints_at,
)
from quire_worker.ops.cpu.microkernel import make_microkernel
from quire_worker.ops.cpu.simd import (
    HAS_AVX512,
    LANES,
    Vector,
    add,
    broadcast,
    fma,
    kernel,
    load,
    load_bfloat16,
    load_broadcast,
    load_high_nibbles,
    load_int8,
    load_low_nibbles,
    multiply,
    prefetch,
    store,
)

BLOCK_SIZE: Final = 32
"""Inputs of a block. The quantised formats have a scale for each block, or for each half of one."""
_HALF_BLOCK: Final = 16
_CACHE_LINE_BYTES: Final = 64
_ZERO: Final = np.float32(0.0)
_PREFETCH_BLOCKS: Final = 8
"""The kernels prefetch weights this many blocks ahead, because with few rows the processor waits for weights."""
_MIN_GEMM_ROWS: Final = 5
"""From this many rows on, the blocked GEMM is faster: it dequantizes weights once for many rows."""
_PANEL_ROWS: Final = 128
_PANEL_BLOCKS: Final = 12
"""The weights of a panel, dequantized, fit in the L1 cache. The inputs of _PANEL_ROWS rows fit in the L2 cache."""
_MICROKERNEL_ROWS, MICROKERNEL_TILES = (8, 2) if HAS_AVX512 else (4, 1)
"""Rows and tiles of a micro-kernel, so that all sums stay in registers: 32 of 16 floats, or 16 of 8 floats."""
_SUMS_PER_ROW: Final = MICROKERNEL_TILES * LANES
_HALF_PANEL_WEIGHTS: Final = _PANEL_BLOCKS * _HALF_BLOCK * _SUMS_PER_ROW
_HALF_PANEL_SUMS: Final = _PANEL_ROWS * _SUMS_PER_ROW
Scales = Float32 | UInt16
"""float32, or the bits of float16 as uint16."""
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
    "macrokernel",
)
"""Arguments of the linear job kernel, in this order: arrays by address, integers by value."""
StoredTiles = tuple[Any, Scales, Scales, int]
"""Data, scale and offset of all tiles, and the number of blocks of a tile."""
OutputView = tuple[Float32, int, int]
"""The result [rows, stride], the stride, and the index of the first tile's first output in a row."""
Dequantize = Callable[[Any, Scales, Scales, int, int], tuple[Vector, Vector]]
"""(data, scale, offset, block, k) -> the LANES weights of input k of a block, and those of input k + 16, as float32.
`block` counts over all tiles."""


@kernel
def uint4(data: UInt8, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """Dequantize inputs k and k + 16 of a block from the low and the high 4 bits of a byte: integer * scale + offset.
    Each block has a scale and an offset for each output."""
    at = (block * _HALF_BLOCK + k) * LANES
    s, o = load(scale, block * LANES), load(offset, block * LANES)
    return fma(load_low_nibbles(data, at), s, o), fma(load_high_nibbles(data, at), s, o)


@kernel
def half_block_uint4(data: UInt8, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """Dequantize inputs k and k + 16 of a block from the low and the high 4 bits of a byte: integer * scale + offset.
    Each half of a block has a scale and an offset for each output."""
    at, first, second = (block * _HALF_BLOCK + k) * LANES, 2 * block * LANES, (2 * block + 1) * LANES
    low, high = load_low_nibbles(data, at), load_high_nibbles(data, at)
    return fma(low, load(scale, first), load(offset, first)), fma(high, load(scale, second), load(offset, second))


@kernel
def int8_with_offset(data: Int8, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """Dequantize inputs k and k + 16 of a block from 8-bit integers: integer * scale + offset. Each block has a scale
    and an offset for each output."""
    at = (block * BLOCK_SIZE + k) * LANES
    s, o = load(scale, block * LANES), load(offset, block * LANES)
    return fma(load_int8(data, at), s, o), fma(load_int8(data, at + _HALF_BLOCK * LANES), s, o)


@kernel
def int8(data: Int8, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """Dequantize inputs k and k + 16 of a block from 8-bit integers: integer * scale. Each block has a scale for each
    output."""
    at, s = (block * BLOCK_SIZE + k) * LANES, load(scale, block * LANES)
    return multiply(load_int8(data, at), s), multiply(load_int8(data, at + _HALF_BLOCK * LANES), s)


@kernel
def half_block_int8(data: Int8, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """Dequantize inputs k and k + 16 of a block from 8-bit integers: integer * scale. Each half of a block has a scale
    for each output."""
    at, first, second = (block * BLOCK_SIZE + k) * LANES, 2 * block * LANES, (2 * block + 1) * LANES
    low, high = load_int8(data, at), load_int8(data, at + _HALF_BLOCK * LANES)
    return multiply(low, load(scale, first)), multiply(high, load(scale, second))


@kernel
def bfloat16(data: UInt16, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """Return inputs k and k + 16 of a block from bfloat16 bits, as float32; no scales."""
    at = (block * BLOCK_SIZE + k) * LANES
    return load_bfloat16(data, at), load_bfloat16(data, at + _HALF_BLOCK * LANES)


@kernel
def floats(data: Float32 | UInt16, scale: Scales, offset: Scales, block: int, k: int) -> tuple[Vector, Vector]:
    """Return inputs k and k + 16 of a block from float32, or from float16 bits as uint16; no scales."""
    at = (block * BLOCK_SIZE + k) * LANES
    return load(data, at), load(data, at + _HALF_BLOCK * LANES)


STORAGE_FORMATS: Final[MappingProxyType[str, Dequantize]] = MappingProxyType(
    {
        each.__name__: each
        for each in (
            uint4,
            half_block_uint4,
            int8_with_offset,
            int8,
            half_block_int8,
            bfloat16,
            floats,
        )
    }
)
"""The formats in which a tile may be stored, by name."""


def _make_prefetch(block_elements: int, line_elements: int) -> Any:
    """Make a kernel (data, block) that prefetches the block _PREFETCH_BLOCKS blocks after `block`, of `block_elements`
    elements, cache line by cache line."""

    @kernel
    def prefetch_block(data: Any, block: int) -> None:
        """Prefetch the block that is _PREFETCH_BLOCKS blocks after this one."""
        begin = (block + _PREFETCH_BLOCKS) * block_elements
        for at in range(begin, begin + block_elements, line_elements):
            prefetch(data, at)

    return prefetch_block


def _make_one_row_kernel(dequantize: Dequantize, prefetch_block: Any) -> Any:
    """Make the kernel that multiplies one row of x with a tile of weights, dequantized on the way."""

    @kernel
    def dot_products(
        x: Float32, x_at: int, data: Any, scale: Scales, offset: Scales, first_block: int, blocks: int
    ) -> Vector:
        """Return the dot products of one row of x with all LANES outputs of a tile, which begins with `first_block`.
        Each is the sum over the first halves of blocks plus the sum over the last halves."""
        a = b = broadcast(_ZERO)
        for block in range(blocks):
            prefetch_block(data, first_block + block)
            for k in range(_HALF_BLOCK):
                w0, w1 = dequantize(data, scale, offset, first_block + block, k)
                i = x_at + block * BLOCK_SIZE + k
                a, b = fma(load_broadcast(x, i), w0, a), fma(load_broadcast(x, i + _HALF_BLOCK), w1, b)
        return add(a, b)

    return dot_products


def _make_four_row_kernel(dequantize: Dequantize, prefetch_block: Any) -> Any:
    """Make the kernel that multiplies four rows of x with a tile of weights, and dequantizes each weight once for all
    four."""

    @kernel
    def dot_products(
        x: Float32, x_at: int, x_stride: int, data: Any, scale: Scales, offset: Scales, first_block: int, blocks: int
    ) -> tuple[Vector, Vector, Vector, Vector]:
        """Return the dot products of four rows of x, which are `x_stride` apart, with all LANES outputs of a tile. A
        row's sums have the same bits as in the kernel for one row."""
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = broadcast(_ZERO)
        for block in range(blocks):
            prefetch_block(data, first_block + block)
            for k in range(_HALF_BLOCK):
                w0, w1 = dequantize(data, scale, offset, first_block + block, k)
                i = x_at + block * BLOCK_SIZE + k
                a0, b0 = fma(load_broadcast(x, i), w0, a0), fma(load_broadcast(x, i + _HALF_BLOCK), w1, b0)
                i += x_stride
                a1, b1 = fma(load_broadcast(x, i), w0, a1), fma(load_broadcast(x, i + _HALF_BLOCK), w1, b1)
                i += x_stride
                a2, b2 = fma(load_broadcast(x, i), w0, a2), fma(load_broadcast(x, i + _HALF_BLOCK), w1, b2)
                i += x_stride
                a3, b3 = fma(load_broadcast(x, i), w0, a3), fma(load_broadcast(x, i + _HALF_BLOCK), w1, b3)
        return add(a0, b0), add(a1, b1), add(a2, b2), add(a3, b3)

    return dot_products


@kernel
def store_four(
    out: Float32, at: int, row_stride: int, sums: tuple[Vector, Vector, Vector, Vector], bias: Vector
) -> None:
    """Store the sums of four rows plus the bias, in rows of `out` that are `row_stride` apart."""
    store(out, at, add(sums[0], bias))
    store(out, at + row_stride, add(sums[1], bias))
    store(out, at + 2 * row_stride, add(sums[2], bias))
    store(out, at + 3 * row_stride, add(sums[3], bias))


@cache
def compile_embedding(storage: str, dtype: np.dtype[Any], scale_dtype: np.dtype[Any]) -> int:
    """Compile the embedding job kernel for a storage format, or load it from the cache on disk, and return its address.
    Its items are rows.

    For each row the kernel dequantizes the weights of one output, that of the row's token, and writes them times a
    factor. Arguments: token [rows], data, scale, offset, blocks of a tile, out [rows, inputs], inputs, factor.
    """
    dequantize = STORAGE_FORMATS[storage]
    data_type, scale_type = numba.from_dtype(dtype), numba.from_dtype(scale_dtype)

    def embed(begin: int, end: int, arguments: Arguments) -> None:
        """Job kernel: write the weights of the tokens of rows begin..end times the factor to `out`.
        `compile_embedding` lists the arguments."""
        token, out, inputs, blocks = ints_at(arguments[0]), floats_at(arguments[5]), arguments[6], arguments[4]
        data = array_at(arguments[1], data_type)
        scale, offset = array_at(arguments[2], scale_type), array_at(arguments[3], scale_type)
        factor, lanes = float_from_bits(arguments[7]), np.empty(2 * LANES, np.float32)
        for row in range(begin, end):
            tile, lane = token[row] // LANES, token[row] % LANES
            for i in range(inputs):
                block, k = i // BLOCK_SIZE, i % BLOCK_SIZE
                if k < _HALF_BLOCK:
                    w0, w1 = dequantize(data, scale, offset, tile * blocks + block, k)
                    store(lanes, 0, w0)
                    out[row * inputs + i] = factor * lanes[lane]
                    store(lanes, LANES, w1)
                    if i + _HALF_BLOCK < inputs:
                        out[row * inputs + i + _HALF_BLOCK] = factor * lanes[LANES + lane]

    return compile_job_kernel(embed, f"embedding of {storage}, {dtype} with {scale_dtype}")


@cache
def compile_linear(storage: str, dtype: np.dtype[Any], scale_dtype: np.dtype[Any]) -> int:
    """Compile the linear job kernel (out = x @ weight.T + bias) for a storage format, or load it from the cache on
    disk, and return its address.

    Its items are tiles, and its arguments are LINEAR_ARGUMENTS.
    """
    linear = _make_linear(storage, dtype)
    data_type, scale_type = numba.from_dtype(dtype), numba.from_dtype(scale_dtype)

    def job(begin: int, end: int, arguments: Arguments) -> None:
        """Job kernel: unpack LINEAR_ARGUMENTS and compute tiles begin..end of the linear layer."""
        bias, out = floats_at(arguments[6]), floats_at(arguments[7])
        data = array_at(arguments[2], data_type)
        scale, offset = array_at(arguments[3], scale_type), array_at(arguments[4], scale_type)
        weight = data, scale, offset, arguments[5]
        output = out, arguments[8], arguments[9]
        linear(begin, end, arguments[0], arguments[1], weight, bias, output, arguments[10])

    return compile_job_kernel(job, f"linear of {storage}, {dtype} with {scale_dtype}")


def _make_linear(storage: str, dtype: np.dtype[Any]) -> Callable[..., None]:
    """Make the linear kernel for a storage format: (begin, end, address of x [rows, blocks * BLOCK_SIZE], rows, weight,
    bias [tiles * LANES], out, address of the macro-kernel). It computes tiles begin..end, without tile `end`."""
    dequantize = STORAGE_FORMATS[storage]
    block_elements = LANES * (BLOCK_SIZE // 2 if "uint4" in storage else BLOCK_SIZE)
    prefetch_block = _make_prefetch(block_elements, _CACHE_LINE_BYTES // np.dtype(dtype).itemsize)
    one_row, four_rows = (
        _make_one_row_kernel(dequantize, prefetch_block),
        _make_four_row_kernel(dequantize, prefetch_block),
    )
    blocked_gemm = _make_blocked_gemm(dequantize, prefetch_block)

    @kernel
    def linear(
        begin: int,
        end: int,
        x_address: int,
        rows: int,
        weight: StoredTiles,
        bias: Float32,
        out: OutputView,
        macrokernel: int,
    ) -> None:
        """Compute tiles begin..end for all rows of x. From 5 rows on, the blocked GEMM does this; fewer rows are
        computed four at a time, then one at a time."""
        if rows >= _MIN_GEMM_ROWS:
            blocked_gemm(begin, end, x_address, rows, weight, bias, out, macrokernel)
            return
        data, scale, offset, blocks = weight
        result, row_stride, first_output = out
        x, x_stride = floats_at(x_address), blocks * BLOCK_SIZE
        for tile in range(begin, end):
            tile_bias, first_block, row, at = load(bias, tile * LANES), tile * blocks, 0, first_output + tile * LANES
            while row + 4 <= rows:
                sums = four_rows(x, row * x_stride, x_stride, data, scale, offset, first_block, blocks)
                store_four(result, row * row_stride + at, row_stride, sums, tile_bias)
                row += 4
            while row < rows:
                s0 = one_row(x, row * x_stride, data, scale, offset, first_block, blocks)
                store(result, row * row_stride + at, add(s0, tile_bias))
                row += 1

    return linear


def _make_blocked_gemm(dequantize: Dequantize, prefetch_block: Any) -> Callable[..., None]:
    """Make the linear kernel for many rows, whose results have the same bits as those for few rows.

    The kernel dequantizes weights into a panel of _PANEL_BLOCKS blocks and MICROKERNEL_TILES tiles. The macro-kernel
    then multiplies up to _PANEL_ROWS rows with the panel. Panels of all storage formats are alike, so the macro-kernel
    is compiled once.
    """

    @kernel
    def blocked_gemm(
        begin: int,
        end: int,
        x_address: int,
        rows: int,
        weight: StoredTiles,
        bias: Float32,
        out: OutputView,
        macrokernel: int,
    ) -> None:
        """Compute tiles begin..end for all rows of x, panel by panel. Each output has one sum over the first halves of
        all blocks and one over the second halves. Add the two sums and the bias, and store them in `out`."""
        data, scale, offset, blocks = weight
        result, row_stride, first_output = out
        x_stride = blocks * BLOCK_SIZE
        panel, sums = np.empty(2 * _HALF_PANEL_WEIGHTS, np.float32), np.empty(2 * _HALF_PANEL_SUMS, np.float32)
        arguments = np.empty(5, np.int64)
        arguments[1], arguments[2], arguments[4] = x_stride, panel.ctypes.data, sums.ctypes.data
        for first_row in range(0, rows, _PANEL_ROWS):
            panel_rows = min(_PANEL_ROWS, rows - first_row)
            for first_tile in range(begin, end, MICROKERNEL_TILES):
                for at in range(0, panel_rows * _SUMS_PER_ROW, LANES):
                    store(sums, at, broadcast(_ZERO))
                    store(sums, _HALF_PANEL_SUMS + at, broadcast(_ZERO))
                for first_block in range(0, blocks, _PANEL_BLOCKS):
                    panel_blocks = min(_PANEL_BLOCKS, blocks - first_block)
                    for panel_tile in range(MICROKERNEL_TILES):
                        # If the number of tiles is odd, the last tile is computed twice and stored once.
                        source_block = min(first_tile + panel_tile, end - 1) * blocks + first_block
                        for block in range(panel_blocks):
                            prefetch_block(data, source_block + block)
                            for k in range(_HALF_BLOCK):
                                at = ((block * _HALF_BLOCK + k) * MICROKERNEL_TILES + panel_tile) * LANES
                                w0, w1 = dequantize(data, scale, offset, source_block + block, k)
                                store(panel, at, w0)
                                store(panel, _HALF_PANEL_WEIGHTS + at, w1)
                    arguments[0] = x_address + (first_row * x_stride + first_block * BLOCK_SIZE) * FLOAT_BYTES
                    arguments[3] = panel_blocks
                    call_job_kernel(macrokernel, 0, panel_rows, arguments.ctypes.data)
                for panel_tile in range(min(MICROKERNEL_TILES, end - first_tile)):
                    tile = first_tile + panel_tile
                    tile_bias, out_at = load(bias, tile * LANES), first_row * row_stride + first_output + tile * LANES
                    for row in range(panel_rows):
                        at = (row * MICROKERNEL_TILES + panel_tile) * LANES
                        store(
                            result,
                            out_at + row * row_stride,
                            add(add(load(sums, at), load(sums, _HALF_PANEL_SUMS + at)), tile_bias),
                        )

    return blocked_gemm


_full_microkernel, _four_row_microkernel, _one_row_microkernel = (
    make_microkernel(rows, MICROKERNEL_TILES, _HALF_BLOCK, BLOCK_SIZE) for rows in (_MICROKERNEL_ROWS, 4, 1)
)


def compile_macrokernel() -> int:
    """Compile the macro-kernel, or load it from the cache on disk, and return its address. Its items are rows.

    Linear jobs get the address as an argument, because it differs from process to process.
    """
    return compile_job_kernel(_macrokernel, "macrokernel")


def _macrokernel(begin: int, end: int, arguments: Arguments) -> None:
    """Job kernel: add the products of rows begin..end with a panel to their sums, for each half of the blocks. It takes
    8 rows at a time (4 without AVX-512), then 4, then 1.

    Arguments: address of row 0 in x, stride of x, panel [2, _PANEL_BLOCKS, 16, tiles, LANES], number of its blocks that
    are filled, sums [2, _PANEL_ROWS, tiles, LANES], with tiles = MICROKERNEL_TILES.
    """
    x, x_stride, panel, blocks = floats_at(arguments[0]), arguments[1], floats_at(arguments[2]), arguments[3]
    sums = floats_at(arguments[4])
    for half in range(2):
        row, x_at, w_at, s_at = begin, half * _HALF_BLOCK, half * _HALF_PANEL_WEIGHTS, half * _HALF_PANEL_SUMS
        while row + _MICROKERNEL_ROWS <= end:
            _full_microkernel(x, x_at + row * x_stride, x_stride, panel, w_at, blocks, sums, s_at + row * _SUMS_PER_ROW)
            row += _MICROKERNEL_ROWS
        if row + 4 <= end:
            _four_row_microkernel(
                x, x_at + row * x_stride, x_stride, panel, w_at, blocks, sums, s_at + row * _SUMS_PER_ROW
            )
            row += 4
        while row < end:
            _one_row_microkernel(
                x, x_at + row * x_stride, x_stride, panel, w_at, blocks, sums, s_at + row * _SUMS_PER_ROW
            )
            row += 1

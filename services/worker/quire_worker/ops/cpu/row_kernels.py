"""Kernels for the CPU whose items are rows: norms, rotary embedding with the page write, gated activation.

Each kernel reads the memory once, where torch would read it several times. A row's results depend on that row alone.
The size of a row must be a multiple of LANES. The docstring of a job kernel begins with its arguments.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quire_worker.arrays import Float32
from quire_worker.ops.cpu.job import Arguments, float_from_bits, floats_at, ints_at
from quire_worker.ops.cpu.simd import (
    LANES,
    Scalar,
    add,
    broadcast,
    divide,
    exp,
    fma,
    kernel,
    load,
    multiply,
    reduce_sum,
    store,
    subtract,
)

_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)


@kernel
def rms_norm(source: Float32, at: int, size: int, norm_weight: Float32, eps: Scalar, out: Float32, out_at: int) -> None:
    """Compute the RMS norm of `size` numbers."""
    sum_of_squares = broadcast(_ZERO)
    for d in range(0, size, LANES):
        x = load(source, at + d)
        sum_of_squares = fma(x, x, sum_of_squares)
    scale = broadcast(_ONE / np.sqrt(np.float32(reduce_sum(sum_of_squares)) / np.float32(size) + eps))
    for d in range(0, size, LANES):
        store(out, out_at + d, multiply(multiply(load(source, at + d), scale), load(norm_weight, d)))


def rms_norm_rows(first: int, last: int, arguments: Arguments) -> None:
    """(x, norm weight, out, size, eps): write the RMS norm of the rows of x to out."""
    x, norm_weight, out = floats_at(arguments[0]), floats_at(arguments[1]), floats_at(arguments[2])
    size, eps = arguments[3], float_from_bits(arguments[4])
    for row in range(first, last):
        rms_norm(x, row * size, size, norm_weight, eps, out, row * size)


def add_rms_norm_rows(first: int, last: int, arguments: Arguments) -> None:
    """(delta, residual, norm weight, out, size, eps): add delta to residual, then write its RMS norm to out."""
    delta, residual = floats_at(arguments[0]), floats_at(arguments[1])
    norm_weight, out = floats_at(arguments[2]), floats_at(arguments[3])
    size, eps = arguments[4], float_from_bits(arguments[5])
    for row in range(first, last):
        for at in range(row * size, (row + 1) * size, LANES):
            store(residual, at, add(load(residual, at), load(delta, at)))
        rms_norm(residual, row * size, size, norm_weight, eps, out, row * size)


def silu_and_mul_rows(first: int, last: int, arguments: Arguments) -> None:
    """(gate_up [rows, 2 * size], out [rows, size], size): write silu(first half) * second half to out."""
    gate_up, out, size = floats_at(arguments[0]), floats_at(arguments[1]), arguments[2]
    for row in range(first, last):
        for d in range(0, size, LANES):
            gate, up = load(gate_up, 2 * row * size + d), load(gate_up, (2 * row + 1) * size + d)
            denominator = add(exp(subtract(broadcast(_ZERO), gate)), broadcast(_ONE))
            store(out, row * size + d, multiply(divide(gate, denominator), up))


def rope_write_rows(first: int, last: int, arguments: Arguments) -> None:
    """(qkv, pool, out, cos, sin, query norm weight, key norm weight, plan, real rows, whether to norm, eps, layer
    offset, KV head stride, page size, KV heads, group, D): implement `Ops.qk_norm_rope_write`.

    Mutates qkv if it norms. plan: the addresses of PLAN_ARRAYS. layer offset: index of the layer's first key within a
    (page, KV head). group: query heads per KV head.
    """
    qkv, pool, out = floats_at(arguments[0]), floats_at(arguments[1]), floats_at(arguments[2])
    cos, sin = floats_at(arguments[3]), floats_at(arguments[4])
    query_norm_weight, key_norm_weight = floats_at(arguments[5]), floats_at(arguments[6])
    plan, real_rows = ints_at(arguments[7]), arguments[8]
    position, write_offset = ints_at(plan[0]), ints_at(plan[1])
    has_norm, eps, layer_offset = arguments[9] != 0, float_from_bits(arguments[10]), arguments[11]
    head_stride, page_size, kv_heads = arguments[12], arguments[13], arguments[14]
    group, head_dim = arguments[15], arguments[16]
    heads = kv_heads * group
    for row in range(first, last):
        at = row * (heads + 2 * kv_heads) * head_dim
        table_at = position[row] * (head_dim // 2)
        for head in range(heads):
            if has_norm:
                rms_norm(qkv, at, head_dim, query_norm_weight, eps, qkv, at)
            apply_rope(qkv, at, cos, sin, table_at, head_dim // 2, out, (row * heads + head) * head_dim)
            at += head_dim
        if row >= real_rows:
            continue
        for head in range(kv_heads):
            key_at = write_offset[row] + head * head_stride + layer_offset
            if has_norm:
                rms_norm(qkv, at, head_dim, key_norm_weight, eps, qkv, at)
            apply_rope(qkv, at, cos, sin, table_at, head_dim // 2, pool, key_at)
            for d in range(0, head_dim, LANES):
                value = load(qkv, at + kv_heads * head_dim + d)
                store(pool, key_at + page_size * head_dim + d, value)
            at += head_dim


@kernel
def apply_rope(
    source: Float32, at: int, cos: Float32, sin: Float32, table_at: int, half: int, out: Float32, out_at: int
) -> None:
    """Rotate a head whose halves are x1 and x2: the results are x1 cos - x2 sin and x2 cos + x1 sin."""
    vector_end = half // LANES * LANES
    for d in range(0, vector_end, LANES):
        a, b, c, s = load(source, at + d), load(source, at + half + d), load(cos, table_at + d), load(sin, table_at + d)
        store(out, out_at + d, subtract(multiply(a, c), multiply(b, s)))
        store(out, out_at + half + d, add(multiply(b, c), multiply(a, s)))
    for d in range(vector_end, half):
        x, y = source[at + d], source[at + half + d]
        out[out_at + d] = x * cos[table_at + d] - y * sin[table_at + d]
        out[out_at + half + d] = y * cos[table_at + d] + x * sin[table_at + d]

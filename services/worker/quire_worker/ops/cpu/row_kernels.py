"""Kernels for the CPU that work on rows one by one: norms, rotary embedding with the page write, gated activation.

Each does in one pass what takes torch several over the same memory. A row's results depend on that row alone. Sizes of
rows are multiples of LANES; callers see to it. A job's docstring begins with its arguments.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quire_worker.arrays import Float32
from quire_worker.ops.cpu.job import Arguments, float_of, floats_at, ints_at
from quire_worker.ops.cpu.simd import (
    LANES,
    Number,
    add,
    divide,
    exp,
    fma,
    kernel,
    load,
    multiply,
    spread,
    store,
    subtract,
    total,
)

_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)


@kernel
def norm(
    source: Float32, at: int, size: int, norm_weight: Float32, eps: Number, target: Float32, target_at: int
) -> None:
    """RMS norm of `size` numbers."""
    squares = spread(_ZERO)
    for d in range(0, size, LANES):
        x = load(source, at + d)
        squares = fma(x, x, squares)
    scale = spread(_ONE / np.sqrt(np.float32(total(squares)) / np.float32(size) + eps))
    for d in range(0, size, LANES):
        store(target, target_at + d, multiply(multiply(load(source, at + d), scale), load(norm_weight, d)))


def norm_rows(first: int, last: int, arguments: Arguments) -> None:
    """(x, norm weight, out, size, eps): rows of x, normed, to out."""
    x, norm_weight, out = floats_at(arguments[0]), floats_at(arguments[1]), floats_at(arguments[2])
    size, eps = arguments[3], float_of(arguments[4])
    for row in range(first, last):
        norm(x, row * size, size, norm_weight, eps, out, row * size)


def add_norm_rows(first: int, last: int, arguments: Arguments) -> None:
    """(delta, residual, norm weight, out, size, eps): the same of residual += delta."""
    delta, residual = floats_at(arguments[0]), floats_at(arguments[1])
    norm_weight, out = floats_at(arguments[2]), floats_at(arguments[3])
    size, eps = arguments[4], float_of(arguments[5])
    for row in range(first, last):
        for at in range(row * size, (row + 1) * size, LANES):
            store(residual, at, add(load(residual, at), load(delta, at)))
        norm(residual, row * size, size, norm_weight, eps, out, row * size)


def silu_gate_rows(first: int, last: int, arguments: Arguments) -> None:
    """(gate_up, out, size): silu(first half) * second half of rows of 2 * size."""
    gate_up, out, size = floats_at(arguments[0]), floats_at(arguments[1]), arguments[2]
    for row in range(first, last):
        for d in range(0, size, LANES):
            gate, up = load(gate_up, 2 * row * size + d), load(gate_up, (2 * row + 1) * size + d)
            weight = add(exp(subtract(spread(_ZERO), gate)), spread(_ONE))
            store(out, row * size + d, multiply(divide(gate, weight), up))


def rope_write_rows(first: int, last: int, arguments: Arguments) -> None:
    """(qkv, pool, out, cos, sin, query norm weight, key norm weight, plan, real rows, normed, eps, where the layer's
    keys begin in a (page, KV head), KV head stride, page size, KV heads, group, D): see `Ops.qk_norm_rope_write`.
    Mutates qkv where `normed`. plan: addresses as in PLAN_ARRAYS.

    write_at: of each real row, where its key of layer 0 and KV head 0 goes. group: query heads per KV head.
    """
    qkv, pool, out = floats_at(arguments[0]), floats_at(arguments[1]), floats_at(arguments[2])
    cos, sin = floats_at(arguments[3]), floats_at(arguments[4])
    query_norm_weight, key_norm_weight = floats_at(arguments[5]), floats_at(arguments[6])
    plan, real_rows = ints_at(arguments[7]), arguments[8]
    position, write_at = ints_at(plan[0]), ints_at(plan[1])
    normed, eps, layer_at = arguments[9] != 0, float_of(arguments[10]), arguments[11]
    head_stride, page_size, kv_heads = arguments[12], arguments[13], arguments[14]
    group, head_dim = arguments[15], arguments[16]
    heads = kv_heads * group
    for row in range(first, last):
        at = row * (heads + 2 * kv_heads) * head_dim
        angle = position[row] * (head_dim // 2)
        for head in range(heads):
            if normed:
                norm(qkv, at, head_dim, query_norm_weight, eps, qkv, at)
            rotate(qkv, at, cos, sin, angle, head_dim // 2, out, (row * heads + head) * head_dim)
            at += head_dim
        if row >= real_rows:
            continue
        for head in range(kv_heads):
            target = write_at[row] + head * head_stride + layer_at
            if normed:
                norm(qkv, at, head_dim, key_norm_weight, eps, qkv, at)
            rotate(qkv, at, cos, sin, angle, head_dim // 2, pool, target)
            for d in range(0, head_dim, LANES):
                value = load(qkv, at + kv_heads * head_dim + d)
                store(pool, target + page_size * head_dim + d, value)
            at += head_dim


@kernel
def rotate(
    source: Float32, at: int, cos: Float32, sin: Float32, angle: int, half: int, target: Float32, target_at: int
) -> None:
    """x1 cos - x2 sin, x2 cos + x1 sin, of two halves."""
    whole = half // LANES * LANES
    for d in range(0, whole, LANES):
        a, b, c, s = load(source, at + d), load(source, at + half + d), load(cos, angle + d), load(sin, angle + d)
        store(target, target_at + d, subtract(multiply(a, c), multiply(b, s)))
        store(target, target_at + half + d, add(multiply(b, c), multiply(a, s)))
    for d in range(whole, half):
        x, y = source[at + d], source[at + half + d]
        target[target_at + d] = x * cos[angle + d] - y * sin[angle + d]
        target[target_at + half + d] = y * cos[angle + d] + x * sin[angle + d]

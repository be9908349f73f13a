"""Kernels for the CPU whose items are rows: norms, rotary embedding with the page write, gated activation, output gate.

Each kernel reads the memory once, where torch would read it several times. A row's results depend on that row alone.
The size of a row must be a multiple of LANES. The docstring of a job kernel begins with its arguments. It computes rows
`first` to `last`, without `last`.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from quire_worker.arrays import Float32
from quire_worker.ops.cpu.erf import ERF_COEFFICIENTS, ERF_SCALE
from quire_worker.ops.cpu.job import Arguments, float_from_bits, floats_at, ints_at
from quire_worker.ops.cpu.simd import (
    LANES,
    Scalar,
    Vector,
    add,
    broadcast,
    divide,
    exp,
    fma,
    kernel,
    load,
    maximum,
    multiply,
    reduce_sum,
    store,
    subtract,
)

_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_HALF: Final = np.float32(0.5)
_ROOT_HALF: Final = np.float32(math.sqrt(0.5))
_GELU_CUBE: Final = np.float32(0.044715)
_GELU_MINUS_TWO: Final = np.float32(-2.0 * math.sqrt(2.0 / math.pi))
_ERF_SCALE: Final = np.float32(ERF_SCALE)
_ERF_A5, _ERF_A4, _ERF_A3, _ERF_A2, _ERF_A1 = (np.float32(each) for each in ERF_COEFFICIENTS)
ACTIVATIONS: Final = ("silu", "gelu_tanh", "gelu", "relu", "relu_squared")
SILU, GELU_TANH, GELU, RELU, RELU_SQUARED = range(len(ACTIVATIONS))


@kernel
def rms_norm(source: Float32, at: int, size: int, norm_weight: Float32, eps: Scalar, out: Float32, out_at: int) -> None:
    """Write the RMS norm of the `size` numbers at source[at] times norm_weight to out[out_at]. `out` may be
    `source`."""
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


def norm_rows(first: int, last: int, arguments: Arguments) -> None:
    """(x, out, x row stride, out row stride, groups, size, norm weight, bias, weight stride, whether to centre, eps):
    write the norm of each of the `groups` parts of each row, `size` numbers each, to out, which may be x. It is a layer
    norm if centred, else an RMS norm.

    bias: 0 where there is none. weight stride: how many numbers a group's weights and biases lie behind those of the
    group before; 0 if all groups share them.
    """
    x, out, x_stride, out_stride = floats_at(arguments[0]), floats_at(arguments[1]), arguments[2], arguments[3]
    groups, size, norm_weight, bias = arguments[4], arguments[5], floats_at(arguments[6]), floats_at(arguments[7])
    has_bias, weight_stride, is_centred = arguments[7] != 0, arguments[8], arguments[9] != 0
    eps = float_from_bits(arguments[10])
    for row in range(first, last):
        for group in range(groups):
            at, out_at, weight_at = (
                row * x_stride + group * size,
                row * out_stride + group * size,
                group * weight_stride,
            )
            mean = broadcast(_ZERO)
            if is_centred:
                for d in range(0, size, LANES):
                    mean = add(mean, load(x, at + d))
                mean = broadcast(np.float32(reduce_sum(mean)) / np.float32(size))
            sum_of_squares = broadcast(_ZERO)
            for d in range(0, size, LANES):
                centred = subtract(load(x, at + d), mean)
                sum_of_squares = fma(centred, centred, sum_of_squares)
            scale = broadcast(_ONE / np.sqrt(np.float32(reduce_sum(sum_of_squares)) / np.float32(size) + eps))
            for d in range(0, size, LANES):
                normed = multiply(multiply(subtract(load(x, at + d), mean), scale), load(norm_weight, weight_at + d))
                if has_bias:
                    normed = add(normed, load(bias, weight_at + d))
                store(out, out_at + d, normed)


def add_rows(first: int, last: int, arguments: Arguments) -> None:
    """(delta, residual, size): add the rows of delta to those of residual."""
    delta, residual, size = floats_at(arguments[0]), floats_at(arguments[1]), arguments[2]
    for at in range(first * size, last * size, LANES):
        store(residual, at, add(load(residual, at), load(delta, at)))


def add_position_rows(first: int, last: int, arguments: Arguments) -> None:
    """(x, table, plan, size): add the row of the table for each row's position. plan: the addresses of PLAN_ARRAYS."""
    x, table, size = floats_at(arguments[0]), floats_at(arguments[1]), arguments[3]
    position = ints_at(ints_at(arguments[2])[0])
    for row in range(first, last):
        for d in range(0, size, LANES):
            store(x, row * size + d, add(load(x, row * size + d), load(table, position[row] * size + d)))


def activation_rows(first: int, last: int, arguments: Arguments) -> None:
    """(source, out [rows, size], size, activation, whether it is gated): write activation(source [rows, size]) to out.
    If gated, source is [rows, 2 * size], and activation(first half) * second half is written. activation: an index of
    ACTIVATIONS."""
    source, out, size, kind = floats_at(arguments[0]), floats_at(arguments[1]), arguments[2], arguments[3]
    is_gated = arguments[4] != 0
    stride = 2 * size if is_gated else size
    for row in range(first, last):
        for d in range(0, size, LANES):
            y = activate(load(source, row * stride + d), kind)
            if is_gated:
                y = multiply(y, load(source, row * stride + size + d))
            store(out, row * size + d, y)


@kernel
def activate(x: Vector, kind: int) -> Vector:
    """Return the activation of 16 numbers. `kind` is an index of ACTIVATIONS: silu, gelu_tanh, gelu (erf), relu or
    relu_squared."""
    zero, one = broadcast(_ZERO), broadcast(_ONE)
    if kind == SILU:
        return divide(x, add(exp(subtract(zero, x)), one))
    if kind == GELU_TANH:
        # x * (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), which holds at both ends.
        cube = multiply(multiply(x, x), multiply(x, broadcast(_GELU_CUBE)))
        return divide(x, add(exp(multiply(add(x, cube), broadcast(_GELU_MINUS_TWO))), one))
    if kind == GELU:
        size = multiply(maximum(subtract(zero, x), x), broadcast(_ROOT_HALF))
        t = divide(one, fma(size, broadcast(_ERF_SCALE), one))
        polynomial = broadcast(_ERF_A5)
        polynomial = fma(polynomial, t, broadcast(_ERF_A4))
        polynomial = fma(polynomial, t, broadcast(_ERF_A3))
        polynomial = fma(polynomial, t, broadcast(_ERF_A2))
        polynomial = fma(polynomial, t, broadcast(_ERF_A1))
        tail = multiply(multiply(polynomial, t), exp(subtract(zero, multiply(size, size))))
        return multiply(broadcast(_HALF), add(x, multiply(maximum(subtract(zero, x), x), subtract(one, tail))))
    positive = maximum(zero, x)
    if kind == RELU_SQUARED:
        return multiply(positive, positive)
    return positive


def silu_and_mul_rows(first: int, last: int, arguments: Arguments) -> None:
    """(gate_up [rows, 2 * size], out [rows, size], size): write silu(first half) * second half to out."""
    gate_up, out, size = floats_at(arguments[0]), floats_at(arguments[1]), arguments[2]
    for row in range(first, last):
        for d in range(0, size, LANES):
            gate, up = load(gate_up, 2 * row * size + d), load(gate_up, (2 * row + 1) * size + d)
            denominator = add(exp(subtract(broadcast(_ZERO), gate)), broadcast(_ONE))
            store(out, row * size + d, multiply(divide(gate, denominator), up))


def sigmoid_gate_rows(first: int, last: int, arguments: Arguments) -> None:
    """(x, gate, size): multiply the rows of x, in place, by the sigmoid of those of gate. x, gate: the addresses of
    rows of `size` floats."""
    x, gate, size = floats_at(arguments[0]), floats_at(arguments[1]), arguments[2]
    for at in range(first * size, last * size, LANES):
        denominator = add(exp(subtract(broadcast(_ZERO), load(gate, at))), broadcast(_ONE))
        store(x, at, divide(load(x, at), denominator))


def rope_write_rows(first: int, last: int, arguments: Arguments) -> None:
    """(qkv, pool, out, cos, sin, query norm weight, key norm weight, plan, real rows, norm order, eps, layer offset, KV
    head stride, page size, KV heads, group, D, table stride): norm and rotate query and key heads. Queries go to out,
    keys and values of real rows to their pages in the pool.

    norm order: 0 no norm, 1 before the rotation (then qkv is mutated), 2 after it. plan: the addresses of PLAN_ARRAYS.
    layer offset: index of the layer's first key within a (page, KV head). group: query heads per KV head. table stride:
    elements of cos and sin from one position to the next.
    """
    qkv, pool, out = floats_at(arguments[0]), floats_at(arguments[1]), floats_at(arguments[2])
    cos, sin = floats_at(arguments[3]), floats_at(arguments[4])
    query_norm_weight, key_norm_weight = floats_at(arguments[5]), floats_at(arguments[6])
    plan, real_rows = ints_at(arguments[7]), arguments[8]
    position, write_offset = ints_at(plan[0]), ints_at(plan[1])
    norms_before, norms_after = arguments[9] == 1, arguments[9] == 2
    eps, layer_offset = float_from_bits(arguments[10]), arguments[11]
    head_stride, page_size, kv_heads = arguments[12], arguments[13], arguments[14]
    group, head_dim, table_stride = arguments[15], arguments[16], arguments[17]
    heads = kv_heads * group
    for row in range(first, last):
        at = row * (heads + 2 * kv_heads) * head_dim
        table_at = position[row] * table_stride
        for head in range(heads):
            if norms_before:
                rms_norm(qkv, at, head_dim, query_norm_weight, eps, qkv, at)
            out_at = (row * heads + head) * head_dim
            apply_rope(qkv, at, cos, sin, table_at, head_dim // 2, out, out_at)
            if norms_after:
                rms_norm(out, out_at, head_dim, query_norm_weight, eps, out, out_at)
            at += head_dim
        if row >= real_rows:
            continue
        for head in range(kv_heads):
            key_at = write_offset[row] + head * head_stride + layer_offset
            if norms_before:
                rms_norm(qkv, at, head_dim, key_norm_weight, eps, qkv, at)
            apply_rope(qkv, at, cos, sin, table_at, head_dim // 2, pool, key_at)
            if norms_after:
                rms_norm(pool, key_at, head_dim, key_norm_weight, eps, pool, key_at)
            for d in range(0, head_dim, LANES):
                value = load(qkv, at + kv_heads * head_dim + d)
                store(pool, key_at + page_size * head_dim + d, value)
            at += head_dim


@kernel
def apply_rope(
    source: Float32, at: int, cos: Float32, sin: Float32, table_at: int, half: int, out: Float32, out_at: int
) -> None:
    """Rotate a head whose halves x1 and x2 have `half` numbers each, and write it to out[out_at]: x1 cos - x2 sin, then
    x2 cos + x1 sin."""
    vector_end = half // LANES * LANES
    for d in range(0, vector_end, LANES):
        a, b, c, s = load(source, at + d), load(source, at + half + d), load(cos, table_at + d), load(sin, table_at + d)
        store(out, out_at + d, subtract(multiply(a, c), multiply(b, s)))
        store(out, out_at + half + d, add(multiply(b, c), multiply(a, s)))
    for d in range(vector_end, half):
        x, y = source[at + d], source[at + half + d]
        out[out_at + d] = x * cos[table_at + d] - y * sin[table_at + d]
        out[out_at + half + d] = y * cos[table_at + d] + x * sin[table_at + d]

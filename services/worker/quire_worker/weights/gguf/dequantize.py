"""Blocks of GGUF tensors as float32, exactly as ggml's reference computes them: same operations in the same order.

Each kind is a function from [blocks, bytes of a block] uint8 to [blocks, values of a block] float32. The layouts are
ggml's (ggml-common.h): `d` and `m` are float16 scales, quants are packed from the low bits up. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire_common.gguf.block_kinds import BlockKind

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_GROUP = 32
# The 16 levels of IQ4: steps are small near zero, where most weights are.
_IQ4_LEVELS: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)


def can_dequantize(kind: BlockKind) -> bool:
    """Whether blocks of a kind can be read."""
    return kind.name in _KINDS


def dequantize(kind: BlockKind, data: Bytes) -> Floats:
    """Values of whole blocks, flat, in the order of the row. `data` is flat, of a multiple of the block's bytes."""
    values: Floats = _KINDS[kind.name](data.reshape(-1, kind.num_bytes))
    return values.reshape(-1)


def _half(blocks: Bytes, begin: int) -> Floats:
    """The float16 at a byte of each block, [blocks, 1]."""
    return blocks[:, begin : begin + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """Low halves of `width` bytes, then their high halves, and so on: [blocks, 2 * bytes]."""
    parts = packed.reshape(len(packed), -1, 1, width) >> np.array([[0], [4]], np.uint8)
    return (parts & np.uint8(15)).reshape(len(packed), -1)


def _pairs_of_bits(packed: Bytes, width: int) -> Bytes:
    """Bits 0-1 of `width` bytes, then their bits 2-3, 4-5 and 6-7, and so on: [blocks, 4 * bytes]."""
    parts = packed.reshape(len(packed), -1, 1, width) >> np.array([[0], [2], [4], [6]], np.uint8)
    return (parts & np.uint8(3)).reshape(len(packed), -1)


def _single_bits(packed: Bytes, width: int) -> Bytes:
    """Bit 0 of `width` bytes, then their bit 1 and so on: [blocks, 8 * bytes]."""
    parts = packed.reshape(len(packed), -1, 1, width) >> np.arange(8, dtype=np.uint8).reshape(8, 1)
    return (parts & np.uint8(1)).reshape(len(packed), -1)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:], 16).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16).astype(np.float32) + _half(blocks, 2)


def _q5(blocks: Bytes, begin: int) -> Bytes:
    """Five bits: four bytes of high bits at `begin`, then the low nibbles."""
    high = np.unpackbits(blocks[:, begin : begin + 4], axis=1, bitorder="little")
    return _nibbles(blocks[:, begin + 4 :], 16) | (high << np.uint8(4))


def _q5_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_q5(blocks, 2).astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _q5(blocks, 4).astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(blocks: Bytes) -> Floats:
    """16 bytes of scale and minimum for 16 values each, 64 bytes of quants, d, m."""
    scales = blocks[:, :16]
    scale = (_half(blocks, 80) * (scales & np.uint8(15)).astype(np.float32))[:, :, None]
    minimum = (_half(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32))[:, :, None]
    quants = _pairs_of_bits(blocks[:, 16:80], _GROUP).reshape(-1, 16, 16)
    return (scale * quants.astype(np.float32) - minimum).reshape(len(blocks), -1)


def _q3_k(blocks: Bytes) -> Floats:
    """32 bytes of high bits, 64 of low ones, 12 of six-bit scales, d. A high bit that is absent takes 4 away."""
    low_scales, high_scales = blocks[:, 96:104], blocks[:, 104:108]
    scales = _nibbles(low_scales, 8) | (_pairs_of_bits(high_scales, 4) << np.uint8(4))
    scale = (_half(blocks, 108) * (scales.astype(np.float32) - 32))[:, :, None]
    low = _pairs_of_bits(blocks[:, 32:96], _GROUP).astype(np.float32)
    high = _single_bits(blocks[:, :32], _GROUP).astype(np.float32)
    quants = (low + (high - 1) * 4).reshape(-1, 16, 16)
    return (scale * quants).reshape(len(blocks), -1)


def _scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight six-bit scales and minima of 12 bytes, each [blocks, 8, 1]: four whole ones in the low bits of bytes 0-7,
    the other four in two parts, nibbles of bytes 8-11 and the high bits of bytes 0-7."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, (rest & 15) | ((first >> 2) & 48)], axis=1)
    minimum = np.concatenate([second & 63, (rest >> 4) | ((second >> 2) & 48)], axis=1)
    return scale.astype(np.float32)[:, :, None], minimum.astype(np.float32)[:, :, None]


def _k_values(blocks: Bytes, quants: Bytes) -> Floats:
    """Of Q4_K and Q5_K: d, m, 12 bytes of scales, quants of eight groups."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0)[:, :, None] * scales, _half(blocks, 2)[:, :, None] * minima
    return (scale * quants.reshape(-1, 8, _GROUP).astype(np.float32) - minimum).reshape(len(blocks), -1)


def _q4_k(blocks: Bytes) -> Floats:
    return _k_values(blocks, _nibbles(blocks[:, 16:], _GROUP))


def _q5_k(blocks: Bytes) -> Floats:
    high = _single_bits(blocks[:, 16:48], _GROUP)
    return _k_values(blocks, _nibbles(blocks[:, 48:], _GROUP) | (high << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Floats:
    """128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d."""
    low = _nibbles(blocks[:, :128], 64)
    quants = (low | (_pairs_of_bits(blocks[:, 128:192], _GROUP) << np.uint8(4))).astype(np.float32) - 32
    scale = (_half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32))[:, :, None]
    return (scale * quants.reshape(-1, 16, 16)).reshape(len(blocks), -1)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _IQ4_LEVELS[_nibbles(blocks[:, 2:], 16)]


def _iq4_xs(blocks: Bytes) -> Floats:
    """d, 16 bits of high pairs and four bytes of low nibbles of eight scales, quants of eight groups."""
    high = (blocks[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    low = _nibbles(blocks[:, 4:8], 1)
    scale = (_half(blocks, 0) * ((low | (high << np.uint8(4))).astype(np.float32) - 32))[:, :, None]
    levels = _IQ4_LEVELS[_nibbles(blocks[:, 8:], 16)].reshape(-1, 8, _GROUP)
    return (scale * levels).reshape(len(blocks), -1)


_KINDS: Final[MappingProxyType[str, Callable[[Bytes], Floats]]] = MappingProxyType(
    {
        "F32": _f32,
        "F16": _f16,
        "BF16": _bf16,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "IQ4_NL": _iq4_nl,
        "IQ4_XS": _iq4_xs,
    }
)
READABLE_KINDS: Final = tuple(_KINDS)

"""Converts blocks of GGUF tensors to small integers with scales, and to float32: exactly the numbers of ggml's
reference.

Each kind of quantized blocks has a function from [blocks, bytes of a block] uint8 to `Quants`. The layouts are ggml's
(ggml-common.h): `d` and `m` are float16 scales, and quants are packed from the low bits up. This module knows nothing
of files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire_common.gguf.block_kinds import BlockKind

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Integers = NDArray[np.int8]

_GROUP = 32
# The 16 levels of IQ4: steps are small near zero, where most weights are.
_IQ4_LEVELS: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)


@dataclass(frozen=True, slots=True)
class Quants:
    """value = integer * scale + offset, in float32. The product is exact or rounded once, as in ggml."""

    integer: Integers
    """[blocks, groups, values of a group]."""
    scale: Floats
    """[blocks, groups]."""
    offset: Floats | None = None
    """[blocks, groups]; None: zero."""
    nibbles_from: int | None = None
    """All integers are of this one and the 15 above it; None: they need more than four bits."""

    def values(self) -> Floats:
        """Return integer * scale + offset, float32 [blocks, groups, values of a group]."""
        product: Floats = self.integer.astype(np.float32)
        product *= self.scale[:, :, None]
        if self.offset is not None:
            product += self.offset[:, :, None]
        return product


def can_dequantize(kind: BlockKind) -> bool:
    """Whether blocks of a kind can be read."""
    return kind.name in READABLE_KINDS


def quants(kind: BlockKind, data: Bytes) -> Quants:
    """Return integers and scales of whole blocks of a quantized kind."""
    return _QUANTISED[kind.name](data.reshape(-1, kind.num_bytes))


def is_quantised(kind: BlockKind) -> bool:
    """Whether blocks of this kind have scales; other kinds are plain floating-point numbers."""
    return kind.name in _QUANTISED


def dequantize(kind: BlockKind, data: Bytes) -> Floats:
    """Return the values of whole blocks, flat, in the order of the row. `data` is flat, and its size is a multiple of
    the block's bytes."""
    if kind.name in _PLAIN:
        return _PLAIN[kind.name](data)
    return quants(kind, data).values().reshape(-1)


def _half(blocks: Bytes, begin: int) -> Floats:
    """Return the float16 at a byte of each block, [blocks, 1]."""
    return blocks[:, begin : begin + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """Return the low halves of `width` bytes, then their high halves, and so on: [blocks, 2 * bytes]."""
    parts = packed.reshape(len(packed), -1, 1, width) >> np.array([[0], [4]], np.uint8)
    return (parts & np.uint8(15)).reshape(len(packed), -1)


def _pairs_of_bits(packed: Bytes, width: int) -> Bytes:
    """Return bits 0-1 of `width` bytes, then their bits 2-3, 4-5 and 6-7, and so on: [blocks, 4 * bytes]."""
    parts = packed.reshape(len(packed), -1, 1, width) >> np.array([[0], [2], [4], [6]], np.uint8)
    return (parts & np.uint8(3)).reshape(len(packed), -1)


def _single_bits(packed: Bytes, width: int) -> Bytes:
    """Return bit 0 of `width` bytes, then their bit 1 and so on: [blocks, 8 * bytes]."""
    parts = packed.reshape(len(packed), -1, 1, width) >> np.arange(8, dtype=np.uint8).reshape(8, 1)
    return (parts & np.uint8(1)).reshape(len(packed), -1)


def _f32(data: Bytes) -> Floats:
    return data.view("<f4").astype(np.float32)


def _f16(data: Bytes) -> Floats:
    return data.view("<f2").astype(np.float32)


def _bf16(data: Bytes) -> Floats:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _signed(integers: Bytes, less: int = 0) -> Integers:
    """Return numbers below 128 minus `less`, as signed numbers."""
    return integers.view(np.int8) - np.int8(less)


def _q4_0(blocks: Bytes) -> Quants:
    return Quants(_signed(_nibbles(blocks[:, 2:], 16), 8)[:, None], _half(blocks, 0), nibbles_from=-8)


def _q4_1(blocks: Bytes) -> Quants:
    return Quants(_signed(_nibbles(blocks[:, 4:], 16))[:, None], _half(blocks, 0), _half(blocks, 2), nibbles_from=0)


def _q5(blocks: Bytes, begin: int) -> Bytes:
    """Return [blocks, 32] values of five bits: four bytes of high bits at `begin`, then the low nibbles."""
    high = np.unpackbits(blocks[:, begin : begin + 4], axis=1, bitorder="little")
    return _nibbles(blocks[:, begin + 4 :], 16) | (high << np.uint8(4))


def _q5_0(blocks: Bytes) -> Quants:
    return Quants(_signed(_q5(blocks, 2), 16)[:, None], _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Quants:
    return Quants(_signed(_q5(blocks, 4))[:, None], _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Quants:
    return Quants(blocks[:, None, 2:].view(np.int8), _half(blocks, 0))


def _q2_k(blocks: Bytes) -> Quants:
    """Read Q2_K: 16 bytes of 4-bit scales and minima for 16 values each, 64 bytes of 2-bit quants, then d and m, which
    multiply scales and minima. Minima are subtracted."""
    scales = blocks[:, :16]
    scale = _half(blocks, 80) * (scales & np.uint8(15)).astype(np.float32)
    minimum = _half(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32)
    integer = _signed(_pairs_of_bits(blocks[:, 16:80], _GROUP))
    return Quants(integer.reshape(-1, 16, 16), scale, -minimum, nibbles_from=0)


def _q3_k(blocks: Bytes) -> Quants:
    """Read Q3_K: 32 bytes of high bits, 64 of low bits, 12 of six-bit scales less 32, d. A high bit of 0 subtracts 4.
    There are 16 groups of 16 values, without offsets."""
    low_scales, high_scales = blocks[:, 96:104], blocks[:, 104:108]
    scales = _nibbles(low_scales, 8) | (_pairs_of_bits(high_scales, 4) << np.uint8(4))
    scale = _half(blocks, 108) * (scales.astype(np.float32) - 32)
    low, high = _pairs_of_bits(blocks[:, 32:96], _GROUP), _single_bits(blocks[:, :32], _GROUP)
    integer = _signed(low | (high << np.uint8(2)), 4)
    return Quants(integer.reshape(-1, 16, 16), scale, nibbles_from=-4)


def _scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Return eight six-bit scales and minima from 12 bytes, each [blocks, 8]. Four of them lie whole in the low bits of
    bytes 0-7. The other four have two parts: nibbles of bytes 8-11, and the high bits of bytes 0-7."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, (rest & 15) | ((first >> 2) & 48)], axis=1)
    minimum = np.concatenate([second & 63, (rest >> 4) | ((second >> 2) & 48)], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _k_quants(blocks: Bytes, integers: Bytes, nibbles_from: int | None = None) -> Quants:
    """Make the `Quants` of Q4_K and Q5_K blocks: d, m, 12 bytes of scales and minima, and the given integers in eight
    groups of 32. Minima are subtracted."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return Quants(_signed(integers).reshape(-1, 8, _GROUP), scale, -minimum, nibbles_from)


def _q4_k(blocks: Bytes) -> Quants:
    return _k_quants(blocks, _nibbles(blocks[:, 16:], _GROUP), nibbles_from=0)


def _q5_k(blocks: Bytes) -> Quants:
    high = _single_bits(blocks[:, 16:48], _GROUP)
    return _k_quants(blocks, _nibbles(blocks[:, 48:], _GROUP) | (high << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Quants:
    """Read Q6_K: 128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d. Integers are less 32, in 16 groups of
    16."""
    low = _nibbles(blocks[:, :128], 64)
    integer = _signed(low | (_pairs_of_bits(blocks[:, 128:192], _GROUP) << np.uint8(4)), 32)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Quants(integer.reshape(-1, 16, 16), scale)


def _iq4_nl(blocks: Bytes) -> Quants:
    return Quants(_IQ4_LEVELS[_nibbles(blocks[:, 2:], 16)][:, None], _half(blocks, 0))


def _iq4_xs(blocks: Bytes) -> Quants:
    """Read IQ4_XS: d, 16 bits of high pairs and four bytes of low nibbles of eight scales less 32, quants of eight
    groups. Quants are indices of the 16 levels of IQ4."""
    high = (blocks[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    low = _nibbles(blocks[:, 4:8], 1)
    scale = _half(blocks, 0) * ((low | (high << np.uint8(4))).astype(np.float32) - 32)
    return Quants(_IQ4_LEVELS[_nibbles(blocks[:, 8:], 16)].reshape(-1, 8, _GROUP), scale)


_PLAIN: Final = MappingProxyType({"F32": _f32, "F16": _f16, "BF16": _bf16})
_QUANTISED: Final[MappingProxyType[str, Callable[[Bytes], Quants]]] = MappingProxyType(
    {
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
READABLE_KINDS: Final = (*_PLAIN, *_QUANTISED)

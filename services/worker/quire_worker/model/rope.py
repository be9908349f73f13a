"""Rotary position embedding: inverse frequencies of each variant, and tables of cosines and sines.

Kernels know one form: all dimensions of a head rotate, dimension i with dimension i + half of the head. Heads of other
forms are loaded with their dimensions in another order (parameters.head_order), which changes no score. Dimensions that
do not rotate have cosine 1 and sine 0. All arithmetic is float32, and the product is computed before the cosine. Models
were trained so, and transformers computes it so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quire_worker.model.arch_spec import RopeSpec

_PIECE = 1 << 16


def inverse_frequencies(rope: RopeSpec, head_dim: int, positions: int = 0) -> Tensor:
    """Return [rotated dimensions // 2] float32 angular steps per position, as the variant scales them. `positions`: the
    greatest number of positions of a sequence, which selects longrope's factors."""
    dims = rope.rotated or head_dim
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    return _VARIANTS[rope.kind](rope, 1.0 / (rope.theta**exponents), positions)


def rope_tables(rope: RopeSpec | None, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of each position, each [positions, head_dim // 2] float32, times the attention factor.
    Dimensions that do not rotate have 1 and 0. For None, which rotates nothing, each is [1, head_dim // 2]."""
    rows = 1 if rope is None else positions
    cos, sin = torch.ones(rows, head_dim // 2), torch.zeros(rows, head_dim // 2)
    if rope is not None:
        frequencies = inverse_frequencies(rope, head_dim, positions)
        # Piece by piece: contexts may have millions of positions, and the tables alone are large then.
        for begin in range(0, positions, _PIECE):
            piece = slice(begin, min(begin + _PIECE, positions))
            angles = torch.outer(torch.arange(piece.start, piece.stop, dtype=torch.float32), frequencies)
            cos[piece, : angles.shape[1]] = angles.cos() * rope.attention_factor
            sin[piece, : angles.shape[1]] = angles.sin() * rope.attention_factor
    return cos, sin


def depends_on_length(rope: RopeSpec | None, positions: int) -> bool:
    """Whether sequences of this many positions have other angles than shorter ones."""
    return rope is not None and rope.kind == "longrope" and positions > rope.original_max_positions


def _default(rope: RopeSpec, plain: Tensor, positions: int) -> Tensor:
    return plain


def _linear(rope: RopeSpec, plain: Tensor, positions: int) -> Tensor:
    return plain / rope.factor


def _llama3(rope: RopeSpec, plain: Tensor, positions: int) -> Tensor:
    """Scale frequencies as Llama 3 does: waves longer than the original context / low_freq_factor are stretched by
    `factor`. Waves shorter than the context / high_freq_factor are kept, and those between are blended."""
    turns = rope.original_max_positions * plain / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return plain * ((1.0 - kept) / rope.factor + kept)


def _yarn(rope: RopeSpec, plain: Tensor, positions: int) -> Tensor:
    """Scale frequencies by YaRN (Peng et al., 2023): fast dimensions are kept, slow ones are divided by `factor`, with
    a linear ramp between. beta_fast and beta_slow, in turns over the original context, limit the ramp; `truncate`
    widens it to whole dimensions. `positions` has no effect."""
    dims = 2 * plain.numel()

    def dimension(turns: float) -> float:
        return dims * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high += 0.001 if low == high else 0
    divided = ((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * divided + plain * (1 - divided)


def _factors(rope: RopeSpec, plain: Tensor, positions: int) -> Tensor:
    """Divide each frequency by its own factor, which the model names. `positions` has no effect."""
    return plain / torch.tensor(rope.factors, dtype=torch.float32)


def _longrope(rope: RopeSpec, plain: Tensor, positions: int) -> Tensor:
    """Divide each frequency by its factor: a long factor if `positions` exceeds the original context, else a short
    one."""
    factors = rope.long_factors if depends_on_length(rope, positions) else rope.factors
    return plain / torch.tensor(factors, dtype=torch.float32)


_VARIANTS: dict[str, Callable[[RopeSpec, Tensor, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
}
SUPPORTED_ROPE_KINDS = tuple(_VARIANTS)

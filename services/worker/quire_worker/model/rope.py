"""Rotary position embedding: inverse frequencies of each variant, and tables of cosines and sines.

Float32 throughout, product before cosine, as the models were trained and as transformers computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quire_worker.model.arch_spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim // 2] float32 angular steps per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return _VARIANTS[rope.kind](rope, 1.0 / (rope.theta**exponents))


def rope_tables(rope: RopeSpec, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [positions, head_dim // 2] float32."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def _default(rope: RopeSpec, plain: Tensor) -> Tensor:
    return plain


def _linear(rope: RopeSpec, plain: Tensor) -> Tensor:
    return plain / rope.factor


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Waves longer than the original context are stretched by `factor`, short ones kept, those between blended."""
    turns = rope.original_max_positions * plain / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return plain * ((1.0 - kept) / rope.factor + kept)


def _factors(rope: RopeSpec, plain: Tensor) -> Tensor:
    return plain / torch.tensor(rope.factors, dtype=torch.float32)


_VARIANTS: dict[str, Callable[[RopeSpec, Tensor], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "factors": _factors,
}
SUPPORTED_ROPE_KINDS = tuple(_VARIANTS)

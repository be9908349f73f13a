"""What a decoder is, as data: every choice that tells one family from another, and nothing of how it is computed.

A family is a function that builds an `ArchSpec` from config.json and a map of tensor names (see `architectures`). This
file knows nothing of files, devices or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]
Activation = Literal["silu", "gelu_tanh"]
QkNorm = Literal["none", "head"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding; the fields below `theta` are read only by the kinds that need them."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    """linear: positions are divided by it; llama3: long wavelengths are."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    factors: tuple[float, ...] = ()
    """factors: what each frequency is divided by, half of head_dim of them."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn)."""


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """One decoder-only transformer. Sizes are of the whole model, before any partition over ranks."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float
    rope: RopeSpec = field(default_factory=RopeSpec)
    norm_weight_offset: float = 0.0
    """Added to every norm's gain (1.0 where checkpoints store gain - 1)."""
    pre_norm: bool = True
    """Normalise what enters attention and MLP."""
    post_norm: bool = False
    """Normalise what leaves attention and MLP, before the residual sum."""
    qk_norm: QkNorm = "none"
    """head: RMS norm over head_dim of every query and key head, before RoPE."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    gated_mlp: bool = True
    tied_embeddings: bool = False
    windows: tuple[int, ...] = ()
    """Per layer: number of positions that a token sees, itself included; 0: all. Empty: 0 for every layer."""
    attention_softcap: float = 0.0
    """Scores become cap * tanh(score / cap); 0: none."""
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    """Multiplies query-key products; 0: head_dim ** -0.5."""
    num_experts: int = 0
    """0: a dense MLP."""
    experts_per_token: int = 0
    expert_intermediate_size: int = 0

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        """What query-key products are multiplied by."""
        return self.attention_scale or self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """Sliding window of a layer; 0: none."""
        return self.windows[layer] if self.windows else 0

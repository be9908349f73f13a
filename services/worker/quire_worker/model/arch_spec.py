"""ArchSpec: the description of a decoder as data. It has every choice in which families differ, and no computation.

A family is a function that builds an `ArchSpec` from config.json, with a map of tensor names (see `architectures`).
This module knows nothing of files, devices or kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "factors"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
NormKind = Literal["rms", "layer"]
QkNormGranularity = Literal["head", "each_head", "whole"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Most fields are read only by the kinds of embedding that need them."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    """linear: positions are divided by it; llama3, yarn: long wavelengths are."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    factors: tuple[float, ...] = ()
    """factors, longrope: what each frequency is divided by, one for each pair of rotated dimensions."""
    long_factors: tuple[float, ...] = ()
    """longrope: the same where sequences may be longer than the original context."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the limits between kept and divided frequencies to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn, longrope)."""
    rotated: int = 0
    """Leading dimensions of a head that are rotated; 0: all."""
    interleaved: bool = False
    """Rotate dimension 2i with 2i + 1, instead of i with i + half of the rotated."""


@dataclass(frozen=True, slots=True)
class QkNormSpec:
    """Norms of query and key heads."""

    granularity: QkNormGranularity = "head"
    """The numbers that are normed together, and the weights of heads. head: each head for itself, with the same weights
    for all; each_head: each head for itself, with weights of its own; whole: all heads together."""
    kind: NormKind = "rms"
    bias: bool = False
    after_rope: bool = False
    """Norm the rotated heads; only where `granularity` is head and `kind` is rms."""

    @property
    def is_fused(self) -> bool:
        """Whether the kernel that rotates the heads norms them too: RMS norms of single heads with the same weights for
        all heads, and no biases."""
        return self.granularity == "head" and self.kind == "rms" and not self.bias


@dataclass(frozen=True, slots=True)
class Attention:
    """A mixer: causal attention over the sequence's KV pages. Heads, KV heads and their size are the same in all
    layers, because one KV group holds the keys and values of all layers."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None = field(default_factory=RopeSpec)
    """None: no rotation."""
    window: int = 0
    """Number of positions that a token sees, itself included; 0: all."""
    chunk: int = 0
    """A token sees the positions of its own chunk of so many; 0: all."""
    alibi: tuple[float, ...] = ()
    """The slope of each head: for each position that the key lies behind the query, so much is taken from a score."""
    sinks: bool = False
    """Each head has a learned score that takes part in the softmax and has no value."""
    qk_norm: QkNormSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qkv_clip: float = 0.0
    """Queries, keys and values are clipped to [-clip, clip]; 0: not."""
    output_gate: bool = False
    """The attention's result is multiplied by the sigmoid of a linear layer of the mixer's input, number by number."""
    softcap: float = 0.0
    """Scores become cap * tanh(score / cap); 0: none."""
    scale: float = 0.0
    """Multiplies query-key products; 0: head_dim ** -0.5."""

    @property
    def query_size(self) -> int:
        """Return the width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Return the width of all key heads, which is also the width of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        """Return the factor of query-key products."""
        return self.scale or self.head_dim**-0.5


@dataclass(frozen=True, slots=True)
class Dense:
    """A feed-forward block with two linear layers, or with three if it is gated."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


Mixer = Attention
"""The part of a layer that mixes positions. Latent attention and recurrent mixers would be further types here."""
FeedForward = Dense
"""The part of a layer that computes each position by itself. A mixture of experts would be a further type here."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a mixer and a feed-forward block, each with its own norms."""

    mixer: Mixer
    feed_forward: FeedForward
    pre_norm: bool = True
    """Normalise what enters the mixer and the feed-forward block."""
    post_norm: bool = False
    """Normalise what leaves them, before the residual sum."""
    parallel: bool = False
    """The feed-forward block takes what the mixer takes, not its result; such a layer has no post norms."""
    shared_norm: bool = False
    """In a parallel layer: one norm for both."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norms of a model that lie on its residual stream."""

    eps: float
    kind: NormKind = "rms"
    weight: bool = True
    bias: bool = False
    weight_offset: float = 0.0
    """Added to the weights of all norms (1.0 where checkpoints store weight - 1)."""


@dataclass(frozen=True, slots=True)
class PositionSpec:
    """Learned position embeddings, added to those of the tokens."""

    rows: int
    offset: int = 0
    """The row of position 0."""


class AttentionLayers(ABC):
    """Facts that follow from the attention of a decoder's layers, for any implementation of these layers."""

    __slots__ = ()

    @property
    @abstractmethod
    def attention(self) -> tuple[Attention, ...]:
        """The attention mixers, in the order of their layers in the KV pages."""

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.attention[0].heads

    @property
    def kv_heads(self) -> int:
        """Key heads of a layer."""
        return self.attention[0].kv_heads

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.attention[0].head_dim

    @property
    def sees_all(self) -> bool:
        """Whether each token attends to all positions up to its own in every layer, with no rules but its scores."""
        return not any(each.window or each.chunk or each.alibi or each.sinks for each in self.attention)

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes that the layers take for each row of a step while they run on a GPU, in addition to weights and
        pages."""

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each attention mixer; 0: none."""
        return tuple(each.window for each in self.attention)

    def _check_one_shape(self) -> None:
        """Raise ValueError if layers differ in heads, KV heads, head size, softcap or score scale, since a KV group has
        one shape."""
        shapes = {(each.heads, each.kv_heads, each.head_dim, each.softcap, each.score_scale) for each in self.attention}
        if len(shapes) != 1:
            raise ValueError(f"layers of {len(shapes)} head shapes, where one KV group has one")


@dataclass(frozen=True, slots=True)
class ArchSpec(AttentionLayers):
    """One decoder-only transformer. Sizes are of the whole model, before any partition over ranks."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_positions: int
    norm: NormSpec
    tied_embeddings: bool = False
    head_bias: bool = False
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    """Normalise the embeddings before the first layer."""
    positions: PositionSpec | None = None

    def __post_init__(self) -> None:
        self._check_one_shape()

    @property
    def attention(self) -> tuple[Attention, ...]:
        """The attention mixers, in the order of their layers in the KV pages."""
        return tuple(layer.mixer for layer in self.layers)

    @property
    def intermediate_size(self) -> int:
        """Width of the widest feed-forward block."""
        return max(layer.feed_forward.intermediate_size for layer in self.layers)

    @property
    def row_bytes(self) -> int:
        """See `AttentionLayers.row_bytes`. This estimates the activations of one layer in bfloat16 from its sizes:
        heads, output gates, hidden and intermediate numbers."""
        gates = any(each.output_gate for each in self.attention)
        heads = (2 + gates) * self.attention[0].query_size + 2 * self.attention[0].kv_size
        return 2 * (heads + 6 * self.hidden_size + 3 * self.intermediate_size)


@dataclass(frozen=True, slots=True)
class TransformersSpec(AttentionLayers):
    """A decoder whose layers transformers computes: the sizes and the attention that Quire must know."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    mixers: tuple[Attention, ...]
    measured_row_bytes: int = 0
    """See `row_bytes`; 0 until it was measured."""

    def __post_init__(self) -> None:
        self._check_one_shape()

    @property
    def attention(self) -> tuple[Attention, ...]:
        """The attention mixers, in the order of their layers in the KV pages."""
        return self.mixers

    @property
    def row_bytes(self) -> int:
        """See `AttentionLayers.row_bytes`."""
        return self.measured_row_bytes


DecoderSpec = ArchSpec | TransformersSpec

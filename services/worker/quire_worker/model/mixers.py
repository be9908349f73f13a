"""The mixers of a decoder's layers: their weights and their computation. There is one class for each type of the spec's
`Mixer`.

A mixer takes the normalised rows of a step and returns the rows to be added to the residual stream. It knows neither
the layer's norms nor its feed-forward block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from quire_worker.model.arch_spec import ArchSpec, Attention, QkNormSpec, RopeSpec
from quire_worker.model.rope import rope_tables
from quire_worker.ops.interface import AttentionRules, HeadNorm, HeadShape, Ops, P, QkNormWeights, RopeTables
from quire_worker.ops.weight import Weight
from quire_worker.weights.parameter_store import ParameterStore


class AttentionInput(NamedTuple):
    """The part of a layer's attention that is computed from the layer's input, apart from keys and values."""

    query: Tensor
    """[R, Q D]."""
    gate: Tensor | None
    """[R, Q D]: its sigmoid multiplies what attention yields. It is a result of `Ops.linear`, with the validity of
    such results."""


Attend = Callable[[AttentionInput, Tensor, int, P, AttentionRules, Weight, Tensor | None], Tensor | None]
"""Attention, its gate and the linear layer behind it: its input, pages, layer, plan, rules, the weight and what to add
to, if that may be done at once -> [R, H], or None where it was."""


class RopeCache:
    """The tables of cosines and sines that layers share."""

    def __init__(self, spec: ArchSpec, positions: int, device: torch.device) -> None:
        self._head_dim = spec.head_dim
        self._positions = positions
        self._device = device
        self._tables: dict[RopeSpec | None, RopeTables] = {}

    def tables(self, rope: RopeSpec | None) -> RopeTables:
        """Return the cosines and sines of a RoPE variant on the device, made at the first call for this variant. None
        stands for no rotation."""
        if rope not in self._tables:
            made = rope_tables(rope, self._head_dim, self._positions)
            self._tables[rope] = RopeTables(*(each.to(self._device) for each in made))
        return self._tables[rope]


@dataclass(frozen=True, slots=True)
class AttentionMixer(Generic[P]):
    """Causal attention over pages, as an `Attention` of the spec describes it."""

    kv_layer: int
    """The layer in the KV pages."""
    shape: HeadShape
    rope: RopeTables
    rules: AttentionRules
    qkv: Weight
    qkv_clip: float
    head_norms: tuple[HeadNorm, ...]
    """Norms of query and key heads by themselves."""
    qk_norm_weights: QkNormWeights | None
    """Norms of query and key heads that the rotation's kernel does."""
    output_gate: Weight | None
    o: Weight

    @classmethod
    def load(
        cls, spec: ArchSpec, attention: Attention, store: ParameterStore, ops: Ops[P], layer: int, ropes: RopeCache
    ) -> AttentionMixer[P]:
        """Take the attention weights of a layer from the store, and let the ops prepare those of linear layers. Norms
        of heads that the rotation's kernel computes are kept apart from the others."""
        norm = attention.qk_norm
        qk_norm_weights = None
        if norm is not None and norm.is_fused:
            query, key = (_head_weights(spec, store, part, layer) for part in "qk")
            qk_norm_weights = QkNormWeights(query, key, spec.norm.eps, norm.after_rope)
        slopes = torch.tensor(attention.alibi, device=store.device) if attention.alibi else None
        sinks = store.require("sinks.weight", layer).float() if attention.sinks else None
        return cls(
            layer,
            HeadShape.of(spec),
            ropes.tables(attention.rope),
            AttentionRules(attention.window, attention.chunk, slopes, sinks),
            ops.prepare(store.take_weight("qkv", layer)),
            attention.qkv_clip,
            () if norm is None or norm.is_fused else _head_norms(spec, attention, norm, store, layer),
            qk_norm_weights,
            ops.prepare(store.take_weight("output_gate", layer)) if attention.output_gate else None,
            ops.prepare(store.take_weight("o", layer)),
        )

    def run(
        self, ops: Ops[P], x: Tensor, pages: Tensor, plan: P, onto: Tensor | None, attend: Attend[P] | None
    ) -> Tensor | None:
        """Compute x [R, H] -> [R, H], and write the rows' keys and values to `pages`. Returns None if the result was
        added to `onto`."""
        return self.attend(ops, self.write(ops, x, pages, plan), pages, plan, onto, attend)

    def write(self, ops: Ops[P], x: Tensor, pages: Tensor, plan: P) -> AttentionInput:
        """Compute queries and output gate from x [R, H], and write the rows' keys and values to `pages`. The fused
        linear layer's result is clipped, normed and rotated as the spec says.

        Afterwards x may be overwritten, but `Ops.linear` may not be called before `attend`.
        """
        qkv = ops.linear(x, self.qkv)
        if self.qkv_clip:
            qkv.clamp_(-self.qkv_clip, self.qkv_clip)
        for norm in self.head_norms:
            ops.head_norm(qkv, norm)
        query = ops.qk_norm_rope_write(qkv, pages, self.kv_layer, plan, self.shape, self.rope, self.qk_norm_weights)
        # `qkv` is a result of `linear` too. Ops whose attention reads it later return a new tensor from `linear`.
        return AttentionInput(query, None if self.output_gate is None else ops.linear(x, self.output_gate))

    def attend(
        self, ops: Ops[P], inputs: AttentionInput, pages: Tensor, plan: P, onto: Tensor | None, attend: Attend[P] | None
    ) -> Tensor | None:
        """Compute attention, its output gate and its output projection [R, H] from the result of `write`. Returns None
        if the result was added to `onto`. `attend`, if given, does all of this instead."""
        if attend is not None:
            return attend(inputs, pages, self.kv_layer, plan, self.rules, self.o, onto)
        attended = ops.paged_attention(inputs.query, pages, self.kv_layer, plan, self.shape, self.rules)
        if inputs.gate is not None:
            ops.sigmoid_gate(attended, inputs.gate)
        return project(ops, attended, self.o, onto)


def _head_norms(
    spec: ArchSpec, attention: Attention, norm: QkNormSpec, store: ParameterStore, layer: int
) -> tuple[HeadNorm, ...]:
    """Return the two norms of query heads and of key heads as parts of the fused linear layer's rows. Each norm covers
    all heads together or each head by itself, by the spec's granularity."""
    found, first = [], 0
    for part, heads in (("q", attention.heads), ("k", attention.kv_heads)):
        size = heads * attention.head_dim
        groups = 1 if norm.granularity == "whole" else heads
        weight, bias = _head_weights(spec, store, part, layer), store.get(f"{part}_norm.bias", layer)
        found.append(HeadNorm(first, groups, size // groups, spec.norm.eps, norm.kind == "layer", weight, bias))
        first += size
    return tuple(found)


def _head_weights(spec: ArchSpec, store: ParameterStore, part: str, layer: int) -> Tensor:
    """Return the weights of the norm of query or key heads; the spec's offset is added in float32."""
    weight, offset = store.require(f"{part}_norm.weight", layer), spec.norm.weight_offset
    return torch.add(weight.float(), offset) if offset else weight


def project(ops: Ops[P], x: Tensor, weight: Weight, onto: Tensor | None) -> Tensor | None:
    """Compute the linear layer that ends a block: [R, H], or None if the result was added to `onto`."""
    return ops.linear(x, weight) if onto is None else ops.add_linear(x, weight, onto)

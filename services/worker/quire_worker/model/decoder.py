"""The one decoder: runs any `ArchSpec` by calling `Ops`. It knows nothing of devices, kernels, files or families."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.parameters import MODEL_WIDE
from quire_worker.model.rope import rope_tables
from quire_worker.ops.interface import HeadShape, Ops, P, QkNormWeights, RopeTables
from quire_worker.ops.weight import Weight
from quire_worker.weights.parameter_store import ParameterStore

Attend = Callable[[Tensor, Tensor, int, P, int, Weight, Tensor | None], Tensor | None]
"""Attention and the linear layer behind it: query [R, Q D], pages, layer, plan, window, the weight and what to add to,
if that may be done at once -> [R, H], or None where it was."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What one layer computes with; None where the spec has no such part."""

    attention_norm: Tensor | None
    qkv: Weight
    qk_norm_weights: QkNormWeights | None
    o: Weight
    attention_post_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Weight
    down: Weight
    mlp_post_norm: Tensor | None


class Decoder(Generic[P]):
    """Token rows in, hidden rows and logits out; keys and values go to the pages that the plan names."""

    def __init__(self, spec: ArchSpec, store: ParameterStore, ops: Ops[P], max_positions: int) -> None:
        self.spec = spec
        self.ops = ops
        self.head_shape = HeadShape.of(spec)
        self.embedding = ops.prepare(store.take_weight("embed", MODEL_WIDE), embeds=True)
        self.final_norm = _norm_weight(spec, store, "final_norm.weight", MODEL_WIDE)
        tables = rope_tables(spec.rope, spec.head_dim, max_positions)
        self.rope = RopeTables(*(table.to(self.final_norm.device) for table in tables))
        self.head = self.embedding if spec.tied_embeddings else _weight(ops, store, "head", MODEL_WIDE)
        self.layers = [_layer_weights(spec, store, ops, layer) for layer in range(spec.layers)]
        self._run_layers = ops.capture(self.run_layers)

    def first_layers(self, count: int) -> Decoder[P]:
        """A decoder of so many of its layers, with the same weights."""
        few = copy.copy(self)
        few.layers = self.layers[:count]
        few._run_layers = few.ops.capture(few.run_layers)
        return few

    def forward(self, token: Tensor, pages: Tensor, plan: P, attend: Attend[P] | None = None) -> Tensor:
        """token [R] int64 -> hidden [R, H] before the final norm; writes the rows' keys and values to `pages`.
        `attend` stands in for attention and the linear layer behind it."""
        if attend is None:
            residual, delta = self._run_layers(token, pages, plan)
        else:
            residual, delta = self.run_layers(token, pages, plan, attend)
        return residual if delta is None else residual.add_(delta)

    def run_layers(
        self, token: Tensor, pages: Tensor, plan: P, attend: Attend[P] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` without its last addition: what is to be added up, [R, H] both."""
        spec, ops = self.spec, self.ops
        attend = self._attend if attend is None else attend
        residual = ops.embedding(token, self.embedding, spec.embedding_scale)
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x = self._enter(delta, residual, layer.attention_norm)
            query = ops.qk_norm_rope_write(
                ops.linear(x, layer.qkv), pages, index, plan, self.head_shape, self.rope, layer.qk_norm_weights
            )
            onto = residual if layer.attention_post_norm is None else None
            delta = attend(query, pages, index, plan, spec.window(index), layer.o, onto)
            delta = self._leave(delta, layer.attention_post_norm)
            x = self._enter(delta, residual, layer.mlp_norm)
            onto = residual if layer.mlp_post_norm is None else None
            delta = self._leave(self.project(self._inner(x, layer), layer.down, onto), layer.mlp_post_norm)
        return residual, delta

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, V]; N must be a multiple of the ops' row multiple."""
        x = self.ops.rms_norm(hidden, self.final_norm, self.spec.norm_eps)
        return self.ops.lm_head(x, self.head, self.spec.logit_softcap)

    def project(self, x: Tensor, weight: Weight, onto: Tensor | None) -> Tensor | None:
        """The linear layer that ends a block: [R, H], or None where it was added to `onto`."""
        return self.ops.linear(x, weight) if onto is None else self.ops.add_linear(x, weight, onto)

    def _attend(
        self, query: Tensor, pages: Tensor, layer: int, plan: P, window: int, weight: Weight, onto: Tensor | None
    ) -> Tensor | None:
        return self.project(self.ops.paged_attention(query, pages, layer, plan, self.head_shape, window), weight, onto)

    def _inner(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """The input of the MLP's last linear layer."""
        ops, kind = self.ops, self.spec.activation
        if self.spec.gated_mlp:
            return ops.gated_linear(x, layer.gate_up, kind)
        return ops.activation(ops.linear(x, layer.gate_up), kind)

    def _enter(self, delta: Tensor | None, residual: Tensor, norm_weight: Tensor | None) -> Tensor:
        """Add what the block before left, if it was not added yet, then normalise for the next one."""
        if norm_weight is None:
            return residual.clone() if delta is None else residual.add_(delta)
        if delta is None:
            return self.ops.rms_norm(residual, norm_weight, self.spec.norm_eps)
        return self.ops.add_rms_norm(delta, residual, norm_weight, self.spec.norm_eps)

    def _leave(self, x: Tensor | None, norm_weight: Tensor | None) -> Tensor | None:
        return x if x is None or norm_weight is None else self.ops.rms_norm(x, norm_weight, self.spec.norm_eps)


def _layer_weights(spec: ArchSpec, store: ParameterStore, ops: Ops[P], layer: int) -> LayerWeights:
    norm_weights = {
        role: _optional_norm_weight(spec, store, f"{role}.weight", layer)
        for role in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    }
    qk_norm_weights = None
    if spec.qk_norm == "head":
        qk_norm_weights = QkNormWeights(
            _norm_weight(spec, store, "q_norm.weight", layer),
            _norm_weight(spec, store, "k_norm.weight", layer),
            spec.norm_eps,
        )
    return LayerWeights(
        qkv=_weight(ops, store, "qkv", layer),
        qk_norm_weights=qk_norm_weights,
        o=_weight(ops, store, "o", layer),
        gate_up=_weight(ops, store, "gate_up", layer),
        down=_weight(ops, store, "down", layer),
        **norm_weights,
    )


def _weight(ops: Ops[P], store: ParameterStore, role: str, layer: int) -> Weight:
    return ops.prepare(store.take_weight(role, layer))


def _norm_weight(spec: ArchSpec, store: ParameterStore, role: str, layer: int) -> Tensor:
    norm_weight = store.require(role, layer)
    return torch.add(norm_weight, spec.norm_weight_offset) if spec.norm_weight_offset else norm_weight


def _optional_norm_weight(spec: ArchSpec, store: ParameterStore, role: str, layer: int) -> Tensor | None:
    return _norm_weight(spec, store, role, layer) if store.get(role, layer) is not None else None

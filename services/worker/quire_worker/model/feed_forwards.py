"""The feed-forward blocks of a decoder's layers: their weights and their computation. There is one class for each type
of the spec's `FeedForward`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from quire_worker.model.arch_spec import Dense
from quire_worker.model.mixers import project
from quire_worker.ops.interface import Ops, P
from quire_worker.ops.weight import Weight
from quire_worker.weights.parameter_store import ParameterStore


@dataclass(frozen=True, slots=True)
class DenseFeedForward(Generic[P]):
    """Two linear layers with an activation between them, or three linear layers if the block is gated."""

    spec: Dense
    gate_up: Weight
    down: Weight

    @classmethod
    def load(cls, spec: Dense, store: ParameterStore, ops: Ops[P], layer: int) -> DenseFeedForward[P]:
        """Take the packed gate and up weight and the down weight of a layer from the store, and let the ops prepare
        them."""
        gate_up, down = (ops.prepare(store.take_weight(role, layer)) for role in ("gate_up", "down"))
        return cls(spec, gate_up, down)

    def run(self, ops: Ops[P], x: Tensor, onto: Tensor | None) -> Tensor | None:
        """Compute x [R, H] -> [R, H]: up, activation and down, with a gate if the block is gated. Returns None if the
        result was added to `onto`."""
        kind = self.spec.activation
        if self.spec.gated:
            inner = ops.gated_linear(x, self.gate_up, kind)
        else:
            inner = ops.activation(ops.linear(x, self.gate_up), kind)
        return project(ops, inner, self.down, onto)

"""The norms on a decoder's residual stream: their weights and their computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_worker.model.arch_spec import ArchSpec
from quire_worker.ops.interface import Ops, P
from quire_worker.weights.parameter_store import ParameterStore


@dataclass(frozen=True, slots=True)
class Norm:
    """One norm over rows of the residual stream."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    is_layer_norm: bool

    @classmethod
    def load(cls, spec: ArchSpec, store: ParameterStore, role: str, layer: int) -> Norm:
        """Take the weight and bias of the norm `role` of a layer from the store. The spec's offset is added to the
        weight: for an RMS norm in float32, and for a layer norm in the store's type, as transformers does. A norm
        without a stored weight gets ones."""
        norm = spec.norm
        weight, bias = store.get(f"{role}.weight", layer), store.get(f"{role}.bias", layer)
        if weight is None:
            weight = torch.ones(spec.hidden_size, dtype=store.dtype, device=store.device)
        elif norm.weight_offset:
            weight = torch.add(weight if norm.kind == "layer" else weight.float(), norm.weight_offset)
        return cls(weight, bias, norm.eps, norm.kind == "layer")

    def scaled(self, factor: float) -> Norm:
        """Return a norm whose results are those of this one times `factor`: its weight and bias are multiplied. For 1.0
        it is this norm itself."""
        if factor == 1.0:
            return self
        bias = None if self.bias is None else self.bias * factor
        return Norm(self.weight * factor, bias, self.eps, self.is_layer_norm)

    def run(self, ops: Ops[P], x: Tensor) -> Tensor:
        """Return the norm of x [R, H]."""
        if self.is_layer_norm:
            return ops.layer_norm(x, self.weight, self.bias, self.eps)
        return ops.rms_norm(x, self.weight, self.eps)

    def add_and_run(self, ops: Ops[P], delta: Tensor | None, residual: Tensor) -> Tensor:
        """Mutate residual [R, H] += delta, if there is a delta, and return the norm of the residual."""
        if delta is None:
            return self.run(ops, residual)
        if not self.is_layer_norm:
            return ops.add_rms_norm(delta, residual, self.weight, self.eps)
        ops.add(delta, residual)
        return self.run(ops, residual)

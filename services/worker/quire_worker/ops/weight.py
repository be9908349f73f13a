"""The kinds of weight that `ops.linear` takes. A weight says how it is stored; an implementation, how it is used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Stored as it is computed with."""

    data: Tensor
    """[outputs, inputs]."""
    bias: Tensor | None = None
    """[outputs]."""

    @property
    def outputs(self) -> int:
        """Size of the result's last axis."""
        return self.data.shape[0]

    @property
    def num_bytes(self) -> int:
        """What a product reads of it."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Weight-only int8 with one scale per output: weight[o, i] = data[o, i] * scale[o]."""

    data: Tensor
    """[outputs, inputs] int8."""
    scale: Tensor
    """[outputs] float32."""
    bias: Tensor | None = None
    """[outputs]."""

    @property
    def outputs(self) -> int:
        """Size of the result's last axis."""
        return self.data.shape[0]

    @property
    def num_bytes(self) -> int:
        """What a product reads of it."""
        return self.data.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)


Weight = DenseWeight | Int8Weight


def quantize_int8(weight: DenseWeight) -> Int8Weight:
    """Symmetric rounding to nearest; an output whose weights are all zero keeps scale 1."""
    largest = weight.data.abs().amax(dim=1).to(torch.float32)
    scale = torch.where(largest > 0, largest / 127.0, torch.ones_like(largest))
    data = (weight.data.to(torch.float32) / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Weight(data, scale, weight.bias)

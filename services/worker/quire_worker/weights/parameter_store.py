"""The tensors that the decoder computes with, by role and layer.

Parameters that are used together are packed into one tensor (query, key and value; gate and up). It knows shapes, not
files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_worker.model.parameters import ParameterSpec

Key = tuple[str, int]


class ParameterStore:
    """Packed tensors, allocated at once and filled by a loader."""

    def __init__(
        self, specs: Sequence[ParameterSpec], dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        rows: dict[Key, int] = {}
        self._place: dict[Key, tuple[Key, int]] = {}
        tails: dict[Key, tuple[int, ...]] = {}
        for spec in specs:
            key = (spec.packed, spec.layer)
            begin = rows.get(key, 0)
            self._place[spec.role, spec.layer] = (key, begin)
            rows[key] = begin + spec.shape[0]
            tails[key] = spec.shape[1:]
        self._packed = {
            key: torch.empty((count, *tails[key]), dtype=dtype, device=device) for key, count in rows.items()
        }

    def destination(self, spec: ParameterSpec) -> Tensor:
        """The part of a packed tensor that is this parameter, a view to be written."""
        key, begin = self._place[spec.role, spec.layer]
        return self._packed[key][begin : begin + spec.shape[0]]

    def get(self, packed: str, layer: int) -> Tensor | None:
        """A packed tensor, or None where the model has none of that role."""
        return self._packed.get((packed, layer))

    def require(self, packed: str, layer: int) -> Tensor:
        """A packed tensor that the model has by its spec; KeyError is a bug of the caller."""
        return self._packed[packed, layer]

    @property
    def num_bytes(self) -> int:
        """Memory that the tensors take."""
        return sum(tensor.nbytes for tensor in self._packed.values())

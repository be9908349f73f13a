"""The tensors that the decoder computes with, by role and layer.

Parameters that are used together are packed into one tensor (query, key and value; gate and up), or kept side by side
as their file stores them. It knows shapes, not files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from quire_common.gguf.block_kinds import BlockKind
from quire_worker.model.parameters import ParameterSpec
from quire_worker.ops.weight import DenseWeight, StoredRows, StoredWeight, Weight

Key = tuple[str, int]
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class ParameterStore:
    """Packed tensors, allocated at once and filled by a loader.

    `stored`: block kinds by (role, layer), for parameters that are stored by themselves, nearly always in their file's
    kind. Of the parameters that share a packed role in a layer, either all are in it or none.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stored: Mapping[Key, BlockKind] | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        rows: dict[Key, int] = {}
        self._place: dict[Key, tuple[Key, int]] = {}
        self._stored: dict[Key, dict[str, StoredRows]] = {}
        tails: dict[Key, tuple[int, ...]] = {}
        for spec in specs:
            kind = None if stored is None else stored.get((spec.role, spec.layer))
            if kind is not None:
                size = prod(spec.shape[1:]) // kind.values * kind.num_bytes
                part = StoredRows(kind, torch.empty((spec.shape[0], size), dtype=torch.uint8))
                self._stored.setdefault((spec.packed, spec.layer), {})[spec.role] = part
                continue
            key = (spec.packed, spec.layer)
            begin = rows.get(key, 0)
            self._place[spec.role, spec.layer] = (key, begin)
            rows[key] = begin + spec.shape[0]
            tails[key] = spec.shape[1:]
        self._packed = {
            key: torch.empty((count, *tails[key]), dtype=dtype, device=device) for key, count in rows.items()
        }

    def is_stored(self, spec: ParameterSpec) -> bool:
        """True if the parameter is stored by itself, in a kind of its own."""
        return spec.role in self._stored.get((spec.packed, spec.layer), ())

    def destination(self, spec: ParameterSpec) -> Tensor:
        """The view to which a parameter is written: its part of a packed tensor, or, if it is stored by itself, its
        rows: numbers of the kind's type, or [rows, bytes of a row] uint8 for quantized blocks."""
        if self.is_stored(spec):
            part = self._stored[spec.packed, spec.layer][spec.role]
            with torch.inference_mode(False):  # threads outside of that mode write to the view
                return part.data.view(_TYPES.get(part.kind.name, torch.uint8))
        key, begin = self._place[spec.role, spec.layer]
        return self._packed[key][begin : begin + spec.shape[0]]

    def blocks_of(self, spec: ParameterSpec, kind: BlockKind) -> Tensor | None:
        """The memory of a parameter that is stored in this kind: [rows, bytes of a row] uint8. None for any other."""
        part = self._stored.get((spec.packed, spec.layer), {}).get(spec.role)
        return part.data if part is not None and part.kind == kind else None

    def replace(self, spec: ParameterSpec, rows: StoredRows) -> None:
        """Store a parameter in another kind. It must be stored by itself already."""
        self._stored[spec.packed, spec.layer][spec.role] = rows

    def get(self, packed: str, layer: int) -> Tensor | None:
        """A packed tensor, or None where the model has none of that role."""
        return self._packed.get((packed, layer))

    def require(self, packed: str, layer: int) -> Tensor:
        """A packed tensor that the model has by its spec; KeyError is a bug of the caller."""
        return self._packed[packed, layer]

    def take_weight(self, packed: str, layer: int) -> Weight:
        """Return a linear or embedding weight by its packed role, without the suffix `.weight`. A weight in its file's
        format leaves the store, so that its memory is freed when the caller drops it: a second call raises KeyError."""
        bias = self.get(f"{packed}.bias", layer)
        parts = self._stored.pop((f"{packed}.weight", layer), None)
        if parts is None:
            return DenseWeight(self.require(f"{packed}.weight", layer), bias)
        return StoredWeight(tuple(parts.values()), bias)

    @property
    def num_bytes(self) -> int:
        """Memory that the tensors take."""
        stored = sum(part.data.nbytes for parts in self._stored.values() for part in parts.values())
        return stored + sum(tensor.nbytes for tensor in self._packed.values())

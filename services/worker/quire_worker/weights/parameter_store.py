"""ParameterStore: the tensors that the decoder uses, by role and layer.

Parameters that are used together are packed into one tensor (query, key and value; gate and up), or kept separately as
their file stores them. The store knows shapes, not files.
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

    `stored` has block kinds by (role, layer), for parameters that are stored separately, nearly always in their file's
    kind. If several parameters share a packed role in a layer, `stored` has all of them or none.
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
        """Whether the parameter is stored separately, in its own kind."""
        return spec.role in self._stored.get((spec.packed, spec.layer), ())

    def destination(self, spec: ParameterSpec) -> Tensor:
        """Return the view to which a parameter is written. This is its part of a packed tensor or, if it is stored
        separately, its rows: numbers of the kind's type, or [rows, bytes of a row] uint8 for quantized blocks."""
        if self.is_stored(spec):
            part = self._stored[spec.packed, spec.layer][spec.role]
            with torch.inference_mode(False):  # threads outside of that mode write to the view
                return part.data.view(_TYPES.get(part.kind.name, torch.uint8))
        key, begin = self._place[spec.role, spec.layer]
        return self._packed[key][begin : begin + spec.shape[0]]

    def blocks_of(self, spec: ParameterSpec, kind: BlockKind) -> Tensor | None:
        """Return the memory of a parameter that is stored in this kind: [rows, bytes of a row] uint8. None for any
        other parameter."""
        part = self._stored.get((spec.packed, spec.layer), {}).get(spec.role)
        return part.data if part is not None and part.kind == kind else None

    def replace(self, spec: ParameterSpec, rows: StoredRows) -> None:
        """Store a parameter in another kind. It must be stored separately already."""
        self._stored[spec.packed, spec.layer][spec.role] = rows

    def get(self, packed: str, layer: int) -> Tensor | None:
        """Return a packed tensor, or None if the model has none of this role or it is stored separately."""
        return self._packed.get((packed, layer))

    def require(self, packed: str, layer: int) -> Tensor:
        """Return a packed tensor that the spec of the model requires. Raises KeyError, which is an error of the caller,
        if the store has none."""
        return self._packed[packed, layer]

    def take_weight(self, packed: str, layer: int) -> Weight:
        """Return a linear or embedding weight by its packed role, without the suffix `.weight`. A weight that is
        stored separately leaves the store, so that its memory is freed when the caller drops it: a second call raises
        KeyError."""
        bias = self.get(f"{packed}.bias", layer)
        parts = self._stored.pop((f"{packed}.weight", layer), None)
        if parts is None:
            return DenseWeight(self.require(f"{packed}.weight", layer), bias)
        return StoredWeight(tuple(parts.values()), bias)

    @property
    def num_bytes(self) -> int:
        """Return the memory, in bytes, of the tensors that are still in the store."""
        stored = sum(part.data.nbytes for parts in self._stored.values() for part in parts.values())
        return stored + sum(tensor.nbytes for tensor in self._packed.values())


def first_five(names: Sequence[str]) -> str:
    """Return the first five names, for an error message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")

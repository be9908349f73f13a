"""SourceTensor: a tensor of a checkpoint, and the model parameters in it. A tensor may hold one parameter or several,
may be transposed, or may have the rows of heads in another order.

This module knows shapes and orders of rows; it knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire_worker.model.architectures.family import Family
    from quire_worker.model.parameters import ParameterSpec
    from quire_worker.weights.parameter_store import ParameterStore


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a checkpoint and the parameters in it, stacked along their outputs in order."""

    specs: tuple[ParameterSpec, ...]
    is_transposed: bool = False
    """[inputs, outputs] in the checkpoint."""
    by_head: bool = False
    """Its rows are in the order that `Family.by_head` describes. False: all rows of the first parameter, then all of
    the next."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint: the `file_shape` of a single parameter that has one, else that of its
        parameters stacked along their outputs, or the reverse of this if it is transposed."""
        first = self.specs[0]
        if len(self.specs) == 1 and first.file_shape:
            return first.file_shape
        shape = (sum(spec.shape[0] for spec in self.specs), *first.shape[1:])
        return shape[::-1] if self.is_transposed else shape

    @property
    def is_whole(self) -> bool:
        """Whether its bytes are those of its one parameter: not transposed, and with rows in the same order."""
        return len(self.specs) == 1 and not self.is_transposed and not self.specs[0].row_order

    def destinations(self, store: ParameterStore) -> tuple[Tensor, Callable[[Tensor], None] | None]:
        """Return the store's tensor of the first parameter, and None if the bytes go directly there. Otherwise the
        second value is a function that takes the loaded tensor and spreads it over the parameters' tensors."""
        targets = [store.destination(spec) for spec in self.specs]
        if self.is_whole:
            return targets[0], None
        return targets[0], lambda tensor: self._spread(tensor, targets)

    def _spread(self, tensor: Tensor, targets: Sequence[Tensor]) -> None:
        """Copy the loaded tensor's rows to the parameters' tensors, with rows of heads in each parameter's
        `row_order`."""
        for target, rows, spec in zip(targets, self._parts(tensor), self.specs, strict=True):
            if spec.row_order:
                unit = len(spec.row_order)
                order = torch.tensor(spec.row_order, device=rows.device)
                rows = rows.reshape(-1, unit, *spec.shape[1:]).index_select(1, order).reshape(spec.shape)
            target.copy_(rows.reshape(spec.shape))

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        """Return the rows of each parameter, in the checkpoint's order. They follow one another or, `by_head`,
        alternate unit by unit."""
        rows = tensor.T if self.is_transposed else tensor
        if len(self.specs) == 1:
            return [rows]
        if not self.by_head:
            return list(torch.split(rows, [spec.shape[0] for spec in self.specs]))
        # The second parameter has as many heads as there are units: key heads, or gates.
        count = self.specs[1].partition.units
        heads = rows.view(count, -1, *rows.shape[1:])
        sizes = [spec.shape[0] // count for spec in self.specs]
        return [part.reshape(-1, *rows.shape[1:]) for part in torch.split(heads, sizes, dim=1)]


def source_tensors(specs: Sequence[ParameterSpec], family: Family) -> dict[str, SourceTensor]:
    """Return the tensors that a checkpoint must have, by name, with the parameters in each. Parameters whose role has
    the same name share a tensor."""
    by_name: dict[str, list[ParameterSpec]] = {}
    for spec in specs:
        by_name.setdefault(family.tensor_name(spec.role, spec.layer), []).append(spec)
    return {
        name: SourceTensor(
            tuple(found),
            is_transposed=len(found[0].shape) == 2 and found[0].role in family.transposed,
            by_head=len(found) > 1 and family.by_head,
        )
        for name, found in by_name.items()
    }

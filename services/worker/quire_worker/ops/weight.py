"""The kinds of weight that `ops.linear` takes. A weight says how it is stored, and an implementation decides how to use
it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_common.gguf.block_kinds import BlockKind
from quire_worker.arrays import Float32, UInt16
from quire_worker.weights.gguf.dequantize import dequantize


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight that is stored in the compute type."""

    data: Tensor
    """[outputs, inputs]."""
    bias: Tensor | None = None
    """[outputs]."""

    @property
    def outputs(self) -> int:
        """Size of the result's last axis."""
        return self.data.shape[0]

    @property
    def inputs(self) -> int:
        """Values of a row."""
        return self.data.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes that one linear call reads."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of one tensor, in the format of its file."""

    kind: BlockKind
    data: Tensor
    """[rows, bytes of a row] uint8."""

    @property
    def inputs(self) -> int:
        """Values of a row."""
        return self.data.shape[1] // self.kind.num_bytes * self.kind.values

    def values(self) -> Tensor:
        """[rows, inputs] float32."""
        flat = torch.from_numpy(dequantize(self.kind, self.data.reshape(-1).numpy()))
        return flat.view(self.data.shape[0], self.inputs)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One or more tensors in the format of their files, stacked along the outputs. An implementation converts them to
    its own format: see `Ops.prepare`."""

    parts: tuple[StoredRows, ...]
    bias: Tensor | None = None
    """[outputs]."""

    @property
    def outputs(self) -> int:
        """Size of the result's last axis."""
        return sum(part.data.shape[0] for part in self.parts)

    @property
    def inputs(self) -> int:
        """Values of a row."""
        return self.parts[0].inputs

    @property
    def num_bytes(self) -> int:
        """Bytes that one linear call reads."""
        return sum(part.data.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    def dense(self) -> DenseWeight:
        """Return the weight's values in float32."""
        return DenseWeight(torch.cat([part.values() for part in self.parts]), self.bias)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Consecutive tiles of one storage format, laid out for the kernels of cpu/linear.py."""

    storage: str
    """One of STORAGE_FORMATS in cpu/linear.py."""
    data: NDArray[Any]
    """Flat: [tiles, blocks, ...], as the storage has it."""
    scale: Float32 | UInt16
    """Flat [tiles, blocks, scales of a block, LANES]: float32, or float16 bits as uint16. Empty if unquantised."""
    offset: Float32 | UInt16
    """Like `scale`; empty if the storage has no offsets."""
    first_output: int
    num_tiles: int

    @property
    def num_bytes(self) -> int:
        """Bytes that one linear call reads."""
        return self.data.nbytes + self.scale.nbytes + self.offset.nbytes


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A weight as tiles. Each output has `blocks` whole blocks of inputs; those from number `inputs` on are zero."""

    segments: tuple[Tiles, ...]
    bias: Float32
    """[outputs of all tiles], zero where there is none."""
    outputs: int
    inputs: int
    blocks: int

    @property
    def num_bytes(self) -> int:
        """Bytes that one linear call reads."""
        return sum(segment.num_bytes for segment in self.segments) + self.bias.nbytes


Weight = DenseWeight | StoredWeight | TiledWeight


def as_dense(weight: Weight) -> DenseWeight:
    """Return the weight. Raises TypeError unless it is dense: `Ops.prepare` must convert the other kinds."""
    if not isinstance(weight, DenseWeight):
        raise TypeError(f"{type(weight).__name__} is not supported here; a DenseWeight is needed")
    return weight

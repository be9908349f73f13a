"""Quantizes float weights to int8 when they are loaded (`--quantize int8`): selects the weights, and computes the
values of their blocks.

A block is 32 consecutive values of a row: 32 int8 numbers and one float16 scale. GGUF calls this Q8_0. Weights that are
quantized in their file keep their blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from quire_common.errors import ConfigError
from quire_common.gguf.block_kinds import KIND_NAMED, BlockKind
from quire_worker.ops.weight import StoredRows
from quire_worker.weights.rounding import FLOATS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_worker.arrays import Float32
    from quire_worker.model.parameters import ParameterSpec
    from quire_worker.weights.parameter_store import ParameterStore

_KIND: Final = KIND_NAMED["Q8_0"]
_LARGEST: Final = 127
_ROWS: Final = 1024
"""Rows that are quantized at once. The bound limits the memory of their float32 values."""


def int8_specs(specs: Iterable[ParameterSpec], kinds: Mapping[tuple[str, int], BlockKind]) -> list[ParameterSpec]:
    """Return the parameters that `quantize_int8` changes: float parameters whose rows are a multiple of 32 values.
    `kinds` has the kinds of the linear and embedding weights, by role and layer; others are left out."""
    found = []
    for spec in specs:
        kind = kinds.get((spec.role, spec.layer))
        if kind is not None and kind.name in FLOATS and spec.shape[1] % _KIND.values == 0:
            found.append(spec)
    return found


def quantize_int8(store: ParameterStore, specs: Iterable[ParameterSpec]) -> None:
    """Replace the given parameters of the store, which are stored separately, by int8 blocks. This is done one after
    another, so that at most one of them is in memory twice.

    Raises ConfigError for a value that is no finite number, or too large for a float16 scale.
    """
    for spec in specs:
        values = store.destination(spec)
        parts = [_blocks(values[first : first + _ROWS].float().numpy()) for first in range(0, len(values), _ROWS)]
        rows = np.concatenate(parts)
        scales = rows.reshape(-1, _KIND.num_bytes)[:, :2].copy().view(np.float16)
        if not np.isfinite(scales).all():
            raise ConfigError(
                "DTYPE_TOO_NARROW",
                f"int8 blocks cannot hold a value of the weight {spec.role} of layer {spec.layer}: it is no finite "
                f"number, or above {float(np.finfo(np.float16).max) * _LARGEST:g}.",
                "Leave --quantize out.",
                param="quantize",
            )
        store.replace(spec, StoredRows(_KIND, torch.from_numpy(rows)))


def _blocks(values: Float32) -> NDArray[np.uint8]:
    """Round rows to blocks as llama.cpp's quantize_row_q8_0 does. The largest magnitude of a block becomes 127, and
    halves are rounded away from zero. Returns uint8 [rows, bytes of a row]: for each block a float16 scale, then 32
    int8 numbers."""
    blocks = values.reshape(-1, _KIND.values)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(_LARGEST)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # the caller refuses scales that are not finite
        scaled = blocks * np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
        stored = scale.astype(np.float16)
    return np.concatenate([stored.view(np.uint8), rounded.view(np.uint8)], axis=1).reshape(len(values), -1)

"""Rounds float weights to the type that --dtype names when they are loaded: selects the weights, and checks that their
values fit.

Quantized blocks keep their values. The loaders do the rounding itself, because they write into memory of that type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from quire_common.errors import ConfigError
from quire_common.gguf.block_kinds import KIND_NAMED, BlockKind
from quire_worker.model.parameters import ParameterSpec
from quire_worker.weights.parameter_store import ParameterStore

FLOATS: Final = ("F32", "F16", "BF16")
"""Kinds that are numbers, not quantized blocks."""
_KINDS: Final = MappingProxyType({"bfloat16": KIND_NAMED["BF16"], "float16": KIND_NAMED["F16"]})
_ROWS = 1024


def rounded_kinds(kinds: Mapping[tuple[str, int], BlockKind], dtype: str) -> dict[tuple[str, int], BlockKind]:
    """Return, by role and layer, the types to which `dtype` rounds weights when they are loaded. Quantized weights, and
    weights that have this type already, are left out. auto and float32 round none, since the CPU computes in float32
    and so keeps each value of the file."""
    wanted = _KINDS.get(dtype)
    if wanted is None:
        return {}
    return {key: wanted for key, kind in kinds.items() if kind.name in FLOATS and kind != wanted}


def check_rounded(store: ParameterStore, specs: Iterable[ParameterSpec]) -> None:
    """Raise ConfigError if a rounded weight has an infinite value: its type could not hold the file's (float16 ends at
    65,504), or that was infinite already."""
    for spec in specs:
        values = store.destination(spec)
        parts = (values[first : first + _ROWS] for first in range(0, len(values), _ROWS))
        if any(bool(part.isinf().any()) for part in parts):
            name = str(values.dtype).removeprefix("torch.")
            raise ConfigError(
                "DTYPE_TOO_NARROW",
                f"{name} cannot hold a value of the weight {spec.role} of layer {spec.layer}: its largest number is "
                f"{torch.finfo(values.dtype).max:g}.",
                "Use --dtype bfloat16 or auto.",
                param="dtype",
            )

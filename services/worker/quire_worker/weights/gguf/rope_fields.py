"""Reads the rotary position embedding of a GGUF file as `rope_parameters` of config.json.

As in llama.cpp, the default type is linear, and a factor of 0 or 1 scales nothing. Lists of factors are tensors.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from quire_common.errors import Unsupported
from quire_common.gguf import GgufModel, TensorPlace
from quire_worker.weights.gguf.refusals import FIX, refused
from quire_worker.weights.gguf.tensor_values import read_values

FACTORS: Final = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
# Tensors that are part of the config.
ROPE_TENSORS: Final = (FACTORS, SHORT, LONG)
ROPE_KEYS: Final = {
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_ext_factor": "extrapolation_factor",
}
_KINDS = ("none", "linear", "yarn", "longrope")


def read_rope_fields(name: str, model: GgufModel, rotated: int, positions: int) -> dict[str, Any]:
    """Return the RoPE of an architecture's file as the fields of `rope_parameters`. `rotated` dimensions of each head
    rotate. `positions`: the context length. A linear scaling by 0 or 1 is none. Where no other type is named, tensors
    of short and long factors mean longrope, and a tensor of plain factors means the type `factors`.

    Raises Unsupported for variants that the worker does not compute, and ConfigError if longrope lacks one of its
    tensors.
    """
    metadata = model.metadata
    kind = metadata.text(f"{name}.rope.scaling.type", "linear")
    factor = metadata.number(f"{name}.rope.scaling.factor", 0.0)
    if kind not in _KINDS:
        raise Unsupported(
            "UNSUPPORTED_ROPE",
            f"{metadata.path}: RoPE variant {kind!r} is not supported in GGUF files; supported are "
            f"{', '.join(_KINDS)}.",
            FIX,
        )
    if kind == "linear" and factor in (0.0, 1.0):
        kind = "none"
    for listed in filter(None, map(model.tensors.get, (SHORT, LONG))):
        # The converter of Phi-3 names no type.
        kind = "longrope" if kind == "none" else kind
        _factors(model, listed, kind, rotated, "longrope")
    rope: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": metadata.number(f"{name}.rope.freq_base", 10000.0),
    }
    original = metadata.integer(f"{name}.rope.scaling.original_context_length", positions, minimum=1)
    if kind == "longrope":
        rope |= _longrope(name, model, rotated, original)
    elif kind == "yarn":
        rope |= _yarn(name, model, factor, original)
    else:
        _refuse_scaled_attention(name, model, 1.0)
        if kind == "linear":
            rope["factor"] = factor
    place = model.tensors.get(FACTORS)
    if place is not None:
        rope |= {"rope_type": "factors", "factors": _factors(model, place, kind, rotated, "none")}
    return rope


def _longrope(name: str, model: GgufModel, rotated: int, original: int) -> dict[str, Any]:
    """Read the short and long factors of longrope from their tensors, and the attention factor, 1 if the file has none.
    Raises ConfigError if the file lacks one of the tensors, and the errors of `_factors`."""
    found: dict[str, Any] = {"original_max_position_embeddings": original}
    for key, tensor in (("short_factor", SHORT), ("long_factor", LONG)):
        place = model.tensors.get(tensor)
        if place is None:
            raise model.metadata.fault(f"the file lacks the tensor {tensor}, which RoPE of the type longrope has")
        found[key] = _factors(model, place, "longrope", rotated, "longrope")
    return found | {"attention_factor": model.metadata.number(f"{name}.rope.scaling.attn_factor", 1.0)}


def _yarn(name: str, model: GgufModel, factor: float, original: int) -> dict[str, Any]:
    """Return the fields of YaRN: factor, original context, beta_fast (32 if absent) and beta_slow (1 if absent).
    llama.cpp scales cosines and sines as the paper does, whatever a file says, so files with other values are
    refused."""
    metadata = model.metadata
    _refuse_scaled_attention(name, model, 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": metadata.number(f"{name}.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number(f"{name}.rope.scaling.yarn_beta_slow", 1.0),
    }


def _refuse_scaled_attention(name: str, model: GgufModel, usual: float) -> None:
    """Raise Unsupported unless attn_factor and yarn_ext_factor are 1, and yarn_attn_factor is 1 or `usual`, the scale
    of cosines and sines of RoPE's type. Absent ones are 1."""
    for key, usual_of_key in (("attn_factor", 1.0), ("yarn_attn_factor", usual), ("yarn_ext_factor", 1.0)):
        value = model.metadata.number(f"{name}.rope.scaling.{key}", 1.0)
        if not any(math.isclose(value, each, rel_tol=1e-5) for each in (1.0, usual_of_key)):
            raise refused(model.metadata, f"{name}.rope.scaling.{key}")


def _factors(model: GgufModel, place: TensorPlace, kind: str, rotated: int, wanted: str) -> list[float]:
    """Return the divisors of RoPE's frequencies, the values of the tensor at `place`. Raises Unsupported if they are
    not one for each pair of the `rotated` dimensions, or if RoPE's type `kind` is not `wanted`."""
    if kind != wanted or place.shape != (rotated // 2,):
        raise Unsupported(
            "UNSUPPORTED_ROPE",
            f"{model.metadata.path}: {place.name} of shape {list(place.shape)} beside the RoPE variant {kind!r} and "
            f"{rotated} rotated dimensions is not supported.",
            FIX,
        )
    values: list[float] = read_values(place).astype(np.float64).tolist()
    return values

"""Computes a model's sizes from config.json or a GGUF file: parameters, bytes of weights, bytes of KV cache per token.

family_layouts.py has the differences between the families that Quire serves. This module knows nothing about speed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.capacity.family_layouts import FamilyLayout, layout_of
from quire.capacity.gguf_fields import is_gguf, read_gguf_fields
from quire.errors import InvalidArgument
from quire.hub.cache import model_name, parse_hub_name

_WEIGHT_BYTES = 2
"""A GPU worker computes in bf16, and converts quantized weights of GGUF files to it."""


@dataclass(frozen=True)
class ModelSizes:
    """Dimensions of a decoder. `tied`: input and output embeddings are one matrix. `mlp_matrices`: three if the MLP is
    gated, otherwise two. `output_gate`: attention has one more matrix, for a gate. `positions`: rows of the position
    embeddings."""

    name: str
    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    context: int
    mlp_matrices: int = 3
    output_gate: bool = False
    positions: int = 0

    @property
    def embedding(self) -> int:
        """Parameters of one embedding matrix."""
        return self.vocabulary * self.hidden_size

    @property
    def gemm_parameters(self) -> int:
        """Parameters that one token's GEMMs multiply: attention, MLPs and the output embedding. An untied input
        embedding is left out, and so are position embeddings."""
        attention = self.hidden_size * self.head_dim * ((2 + self.output_gate) * self.heads + 2 * self.kv_heads)
        mlp = self.mlp_matrices * self.hidden_size * self.intermediate_size
        return self.layers * (attention + mlp) + self.embedding

    @property
    def parameters(self) -> int:
        """All parameters except norms and biases, which are few."""
        return self.gemm_parameters + (0 if self.tied else self.embedding) + self.positions * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on the device."""
        return self.parameters * _WEIGHT_BYTES

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that a step reads."""
        return self.gemm_parameters * _WEIGHT_BYTES

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values, in bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _WEIGHT_BYTES


def read_sizes(model: Path) -> ModelSizes:
    """Return the sizes of the model whose folder, config.json or GGUF file is at this path. Sizes that config.json
    lacks have the family's defaults (family_layouts.py). Without one, the KV heads equal the heads, and head_dim is
    hidden_size / heads. A head_dim of null is hidden_size / heads in every family. Raises InvalidArgument if the file
    cannot be read, if a size without a default is missing, or if one is not an integer from 1 to 2**31 - 1, and the
    errors of `read_gguf_fields`."""
    path = model / "config.json" if model.is_dir() else model
    fields = read_gguf_fields(path) if is_gguf(path) else _read_config(path)
    layout = layout_of(fields)
    fields = layout.adapt(fields)
    heads = _size(fields, "num_attention_heads", path)
    hidden_size = _size(fields, "hidden_size", path)
    default_head_dim = 0 if "head_dim" in fields else layout.default_head_dim
    default_mlp_width = _default_mlp_width(fields, layout, hidden_size, path)
    context = _size(fields, "max_position_embeddings", path, layout.default_context)
    tied = fields.get("tie_word_embeddings")
    return ModelSizes(
        name=_name(model),
        hidden_size=hidden_size,
        layers=_size(fields, "num_hidden_layers", path),
        intermediate_size=_size(fields, "intermediate_size", path, default_mlp_width),
        heads=heads,
        kv_heads=_kv_heads(fields, layout, heads, path),
        head_dim=_size(fields, "head_dim", path, default_head_dim or max(1, hidden_size // heads)),
        vocabulary=_size(fields, "vocab_size", path),
        tied=layout.default_tied if tied is None else tied is True,
        context=context,
        mlp_matrices=3 if layout.gated else 2,
        output_gate=layout.output_gate,
        positions=0 if layout.extra_positions is None else context + layout.extra_positions,
    )


def _default_mlp_width(fields: Mapping[str, Any], layout: FamilyLayout, hidden_size: int, path: Path) -> int | None:
    """Return the width of an MLP without `intermediate_size`; None if the family has no default. `expansion_ratio` is
    MPT's field. Raises the errors of `_size`."""
    if not layout.default_mlp_ratio:
        return None
    return hidden_size * _size(fields, "expansion_ratio", path, layout.default_mlp_ratio)


def _kv_heads(fields: Mapping[str, Any], layout: FamilyLayout, heads: int, path: Path) -> int:
    """Return the number of KV heads. A Falcon without `new_decoder_architecture` has one KV head, unless `multi_query`
    is false. Raises the errors of `_size`."""
    if not layout.falcon_kv_heads:
        return _size(fields, "num_key_value_heads", path, heads)
    if fields.get("new_decoder_architecture"):
        return _size(fields, "num_kv_heads", path, heads)
    return 1 if fields.get("multi_query", True) else heads


def _name(model: Path) -> str:
    """Return the model's name: that of the GGUF file without its ending, else that of the folder (see `model_name`)."""
    if is_gguf(model):
        return model.stem if model.suffix.lower() == ".gguf" else model.name
    return model_name(model if model.is_dir() else model.parent)


def _read_config(path: Path) -> Mapping[str, Any]:
    """Return the fields of a config.json. Raises InvalidArgument if it cannot be read, or is no JSON object."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, type(error).__name__) from error
    if not isinstance(fields, dict):
        raise _unreadable(path, "no JSON object")
    return fields


def _size(fields: Mapping[str, Any], name: str, path: Path, default: int | None = None) -> int:
    """Return the field `name`, or `default` if it is missing or null. Raises InvalidArgument unless it is an integer
    from 1 to 2**31 - 1; `path` is named in the error."""
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise InvalidArgument(
            "BAD_MODEL_SIZES",
            f"{path}: `{name}` is {value!r:.80}, not a number of at least 1.",
            "Give the folder of a text model that Quire serves, with its own config.json.",
            param="model",
        )
    return value


def _unreadable(path: Path, cause: str) -> InvalidArgument:
    """Return the InvalidArgument for a config.json that cannot be read as an object. `path` is a name of the hub if the
    cache lacks this model: the fix then is the command that downloads it."""
    named = parse_hub_name(str(path))
    fix = f"Download the model: {named.download_command}" if named else "Give a Hugging Face folder or a GGUF file."
    return InvalidArgument("BAD_MODEL_SIZES", f"{path} cannot be read ({cause}).", fix, param="model")

"""The parameters that an `ArchSpec` implies: their shapes, what they are packed into, and how ranks would share them.

It knows nothing of checkpoints' names or of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire_worker.model.arch_spec import ArchSpec

PartitionKind = Literal["replicated", "column", "row", "vocab"]
MODEL_WIDE = -1


@dataclass(frozen=True, slots=True)
class Partition:
    """How a parameter is cut over the ranks of a tensor-parallel group.

    column: along the output axis, each rank computing its own outputs. row: along the input axis, outputs being summed
    over ranks. vocab: along the vocabulary. Cuts fall on multiples of `unit` along `axis`, so heads are never split;
    `units` is how many there are, and a rank count above it means that units are replicated (KV heads).
    """

    kind: PartitionKind = "replicated"
    axis: int = 0
    unit: int = 1
    units: int = 1


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One tensor of the model, as checkpoints have it, and its place among those that the decoder computes with."""

    role: str
    """What it is, for example `q.weight`; the key of a family's name map."""
    layer: int
    """MODEL_WIDE for what no layer owns."""
    shape: tuple[int, ...]
    partition: Partition
    packed: str
    """Role of the tensor that holds it: parameters of one `packed` role are stacked along axis 0, in order."""


def parameter_specs(spec: ArchSpec) -> tuple[ParameterSpec, ...]:
    """All parameters, in a fixed order."""
    found = [
        ParameterSpec("embed.weight", MODEL_WIDE, (spec.vocab_size, spec.hidden_size), _vocab(spec), "embed.weight")
    ]
    for layer in range(spec.layers):
        found += _layer(spec, layer)
    found.append(_norm(spec, MODEL_WIDE, "final_norm.weight"))
    if not spec.tied_embeddings:
        shape = (spec.vocab_size, spec.hidden_size)
        found.append(ParameterSpec("head.weight", MODEL_WIDE, shape, _vocab(spec), "head.weight"))
    return tuple(found)


def _vocab(spec: ArchSpec) -> Partition:
    return Partition("vocab", 0, 1, spec.vocab_size)


def _norm(spec: ArchSpec, layer: int, role: str, size: int = 0) -> ParameterSpec:
    return ParameterSpec(role, layer, (size or spec.hidden_size,), Partition(), role)


def _layer(spec: ArchSpec, layer: int) -> list[ParameterSpec]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query = Partition("column", 0, spec.head_dim, spec.heads)
    key_value = Partition("column", 0, spec.head_dim, spec.kv_heads)
    column = Partition("column", 0, 1, inner)
    found: list[ParameterSpec] = []
    if spec.pre_norm:
        found.append(_norm(spec, layer, "attention_norm.weight"))
    for part, size, cut in (
        ("q", spec.query_size, query),
        ("k", spec.kv_size, key_value),
        ("v", spec.kv_size, key_value),
    ):
        found.append(ParameterSpec(f"{part}.weight", layer, (size, hidden), cut, "qkv.weight"))
        if spec.qkv_bias:
            found.append(ParameterSpec(f"{part}.bias", layer, (size,), cut, "qkv.bias"))
    if spec.qk_norm == "head":
        found += [_norm(spec, layer, role, spec.head_dim) for role in ("q_norm.weight", "k_norm.weight")]
    row = Partition("row", 1, spec.head_dim, spec.heads)
    found.append(ParameterSpec("o.weight", layer, (hidden, spec.query_size), row, "o.weight"))
    if spec.o_bias:
        found.append(ParameterSpec("o.bias", layer, (hidden,), Partition(), "o.bias"))
    if spec.post_norm:
        found.append(_norm(spec, layer, "attention_post_norm.weight"))
    if spec.pre_norm:
        found.append(_norm(spec, layer, "mlp_norm.weight"))
    for part in ("gate", "up") if spec.gated_mlp else ("up",):
        found.append(ParameterSpec(f"{part}.weight", layer, (inner, hidden), column, "gate_up.weight"))
        if spec.mlp_bias:
            found.append(ParameterSpec(f"{part}.bias", layer, (inner,), column, "gate_up.bias"))
    found.append(ParameterSpec("down.weight", layer, (hidden, inner), Partition("row", 1, 1, inner), "down.weight"))
    if spec.mlp_bias:
        found.append(ParameterSpec("down.bias", layer, (hidden,), Partition(), "down.bias"))
    if spec.post_norm:
        found.append(_norm(spec, layer, "mlp_post_norm.weight"))
    return found

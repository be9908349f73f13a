"""The parameters that an `ArchSpec` implies: their shapes, the packed tensors that hold them, and their partition over
ranks.

This module knows neither the names in checkpoints nor values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from quire_worker.model.arch_spec import ArchSpec, Attention, Dense, LayerSpec, QkNormSpec, RopeSpec

PartitionKind = Literal["replicated", "column", "row", "vocab"]
MODEL_WIDE = -1


@dataclass(frozen=True, slots=True)
class Partition:
    """The partition of a parameter over the ranks of a tensor-parallel group.

    column: along the output axis; each rank computes its own outputs. row: along the input axis; outputs are summed
    over ranks. vocab: along the vocabulary. Cuts fall on multiples of `unit` along `axis`, so heads are never split.
    `units` is the number of units. If there are more ranks than units, units are replicated (KV heads).
    """

    kind: PartitionKind = "replicated"
    axis: int = 0
    unit: int = 1
    units: int = 1


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One tensor of the model, as checkpoints have it, and its place in a packed tensor of the decoder."""

    role: str
    """What it is, for example `q.weight`; the key of a family's name map."""
    layer: int
    """MODEL_WIDE for what no layer owns."""
    shape: tuple[int, ...]
    partition: Partition
    packed: str
    """Role of the tensor that holds it: parameters of one `packed` role are stacked along axis 0, in order."""
    row_order: tuple[int, ...] = ()
    """Rows come in units of so many: row i of a unit is row row_order[i] of the checkpoint's. Empty: no change."""
    file_shape: tuple[int, ...] = ()
    """Its shape in checkpoints, with as many elements; empty: `shape`."""

    @property
    def is_matrix(self) -> bool:
        """Whether the tensor is the weight of a linear layer or of the token embedding."""
        return len(self.shape) == 2 and self.role != POSITIONS


POSITIONS: Final = "positions.weight"
_GATE: Final = "output_gate.weight"


def parameter_specs(spec: ArchSpec) -> tuple[ParameterSpec, ...]:
    """Return all parameters that checkpoints of this model have, in a fixed order: embeddings, layers, final norm,
    output head. A tied head has no weight of its own."""
    found = [
        ParameterSpec("embed.weight", MODEL_WIDE, (spec.vocab_size, spec.hidden_size), _vocab(spec), "embed.weight")
    ]
    if spec.positions is not None:
        shape = (spec.positions.rows, spec.hidden_size)
        found.append(ParameterSpec(POSITIONS, MODEL_WIDE, shape, Partition(), POSITIONS))
    if spec.embedding_norm:
        found += _norm(spec, MODEL_WIDE, "embedding_norm")
    for index, layer in enumerate(spec.layers):
        found += _layer(spec, layer, index)
    found += _norm(spec, MODEL_WIDE, "final_norm")
    if not spec.tied_embeddings:
        shape = (spec.vocab_size, spec.hidden_size)
        found.append(ParameterSpec("head.weight", MODEL_WIDE, shape, _vocab(spec), "head.weight"))
    if spec.head_bias:
        found.append(ParameterSpec("head.bias", MODEL_WIDE, (spec.vocab_size,), _vocab(spec), "head.bias"))
    return tuple(found)


def _vocab(spec: ArchSpec) -> Partition:
    return Partition("vocab", 0, 1, spec.vocab_size)


def _norm(spec: ArchSpec, index: int, role: str) -> list[ParameterSpec]:
    kinds = (*("weight",) * spec.norm.weight, *("bias",) * spec.norm.bias)
    return [_vector(f"{role}.{kind}", index, spec.hidden_size) for kind in kinds]


def _vector(role: str, index: int, size: int) -> ParameterSpec:
    return ParameterSpec(role, index, (size,), Partition(), role)


def _layer(spec: ArchSpec, layer: LayerSpec, index: int) -> list[ParameterSpec]:
    """Return the parameters of one layer: attention, then the feed-forward block, each after its pre-norm and before
    its post-norm, if it has them."""
    found: list[ParameterSpec] = []
    for block, parameters in (
        ("attention", _attention(spec, layer.mixer, index)),
        ("mlp", _dense(spec, layer.feed_forward, index)),
    ):
        if layer.pre_norm and not (layer.shared_norm and block == "mlp"):
            found += _norm(spec, index, f"{block}_norm")
        found += parameters
        if layer.post_norm:
            found += _norm(spec, index, f"{block}_post_norm")
    return found


def _attention(spec: ArchSpec, attention: Attention, index: int) -> list[ParameterSpec]:
    """Return the parameters of one layer's attention: query, key and value (packed as qkv), norms of heads, sinks,
    output gate and output projection.

    Rows of queries and keys are reordered as RoPE needs. Linear layers are cut between heads. Norms, sinks and the
    output projection's bias are replicated.
    """
    hidden, order = spec.hidden_size, head_order(attention.rope, attention.head_dim)
    query = Partition("column", 0, attention.head_dim, attention.heads)
    key_value = Partition("column", 0, attention.head_dim, attention.kv_heads)
    found: list[ParameterSpec] = []
    for part, size, cut in (
        ("q", attention.query_size, query),
        ("k", attention.kv_size, key_value),
        ("v", attention.kv_size, key_value),
    ):
        turned = () if part == "v" else order
        found.append(ParameterSpec(f"{part}.weight", index, (size, hidden), cut, "qkv.weight", turned))
        if attention.qkv_bias:
            found.append(ParameterSpec(f"{part}.bias", index, (size,), cut, "qkv.bias", turned))
    if attention.qk_norm is not None:
        found += _qk_norm(attention, attention.qk_norm, index, order)
    if attention.sinks:
        found.append(_vector("sinks.weight", index, attention.heads))
    if attention.output_gate:
        found.append(ParameterSpec(_GATE, index, (attention.query_size, hidden), query, _GATE))
    row = Partition("row", 1, attention.head_dim, attention.heads)
    found.append(ParameterSpec("o.weight", index, (hidden, attention.query_size), row, "o.weight"))
    if attention.o_bias:
        found.append(ParameterSpec("o.bias", index, (hidden,), Partition(), "o.bias"))
    return found


def _qk_norm(attention: Attention, norm: QkNormSpec, index: int, order: tuple[int, ...]) -> list[ParameterSpec]:
    """Return the weights, and the biases if there are any, of the norms over query heads and over key heads. They have
    one head's size, or that of all heads by granularity, with dimensions in `order`, and are replicated. With the
    granularity `each_head`, files have them as [heads, D]."""
    found = []
    for part, heads in (("q", attention.heads), ("k", attention.kv_heads)):
        for kind in ("weight", *("bias",) * norm.bias):
            role, size = f"{part}_norm.{kind}", attention.head_dim * (1 if norm.granularity == "head" else heads)
            in_file = (heads, attention.head_dim) if norm.granularity == "each_head" else ()
            found.append(ParameterSpec(role, index, (size,), Partition(), role, order, in_file))
    return found


def _dense(spec: ArchSpec, dense: Dense, index: int) -> list[ParameterSpec]:
    """Return the parameters of one feed-forward block: gate (if gated) and up, packed as gate_up, then down, each with
    a bias if the spec has biases."""
    hidden, inner = spec.hidden_size, dense.intermediate_size
    column = Partition("column", 0, 1, inner)
    found: list[ParameterSpec] = []
    for part in ("gate", "up") if dense.gated else ("up",):
        found.append(ParameterSpec(f"{part}.weight", index, (inner, hidden), column, "gate_up.weight"))
        if dense.bias:
            found.append(ParameterSpec(f"{part}.bias", index, (inner,), column, "gate_up.bias"))
    found.append(ParameterSpec("down.weight", index, (hidden, inner), Partition("row", 1, 1, inner), "down.weight"))
    if dense.bias:
        found.append(ParameterSpec("down.bias", index, (hidden,), Partition(), "down.bias"))
    return found


def head_order(rope: RopeSpec | None, head_dim: int) -> tuple[int, ...]:
    """Return, for each dimension of a query or key head of the decoder, the checkpoint's dimension; empty if they are
    the same.

    The decoder rotates dimension i with i + half of the head. So pairs that the checkpoint rotates are put there, and
    dimensions that do not rotate fill the rest.
    """
    rotated = head_dim if rope is None or not rope.rotated else rope.rotated
    half, middle = rotated // 2, (head_dim + rotated) // 2
    if rope is not None and rope.interleaved:
        first, second = range(0, rotated, 2), range(1, rotated, 2)
    else:
        first, second = range(half), range(half, rotated)
    order = (*first, *range(rotated, middle), *second, *range(middle, head_dim))
    return () if order == tuple(range(head_dim)) else order

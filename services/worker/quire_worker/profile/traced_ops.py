"""TracedOps: any `Ops` with a named range around each call, and the least bytes and operations of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.profiler import record_function

from quire_common.credit import LogprobColumns
from quire_worker.arrays import Int32
from quire_worker.model.arch_spec import Activation
from quire_worker.ops.interface import AttentionRules, HeadNorm, HeadShape, Ops, P, QkNormWeights, RopeTables, RunLayers
from quire_worker.ops.weight import Weight
from quire_worker.profile.cost import (
    Attended,
    Cost,
    activation_cost,
    attention_cost,
    embedding_cost,
    gated_product_cost,
    logits_cost,
    norm_cost,
    product_cost,
    rope_cost,
)
from quire_worker.profile.kernel_parts import ATTENTION, DECODE_ATTENTION, LOGPROBS, PREFILL_ATTENTION
from quire_worker.sampling.columns import SamplingColumns

PREFIX = "quire: "
R = TypeVar("R")


class TracedOps(Generic[P]):
    """Implements `Ops`. `attended`: the keys to which decoding and prefilling sequences attend in a step."""

    def __init__(self, ops: Ops[P], attended: tuple[Attended, Attended]) -> None:
        self._ops = ops
        self._attended = attended
        self.costs: dict[str, Cost] = {}

    @property
    def row_multiple(self) -> int:
        return self._ops.row_multiple

    @property
    def max_recorded_rows(self) -> int:
        return self._ops.max_recorded_rows

    @property
    def batch_invariant(self) -> bool:
        return self._ops.batch_invariant

    def prepare(self, weight: Weight, *, embeds: bool = False) -> Weight:
        return self._ops.prepare(weight, embeds=embeds)

    def plan(self, pages: Tensor, rows: int, position: Int32, count: Int32, page_table: Int32) -> P:
        return self._ops.plan(pages, rows, position, count, page_table)

    def positions(self, plan: P) -> Tensor:
        return self._ops.positions(plan)

    def capture(self, run: RunLayers[P]) -> RunLayers[P]:
        return run

    def embedding(self, token: Tensor, weight: Weight, scale: float) -> Tensor:
        """Call the wrapped `embedding` in the named range "embedding", and count its cost."""
        cost = embedding_cost(token.shape[0], weight.inputs, weight.num_bytes // (weight.outputs * weight.inputs))
        return self._trace("embedding", cost, lambda: self._ops.embedding(token, weight, scale))

    def rms_norm(self, x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """Call the wrapped `rms_norm` in the named range "norm", and count its cost."""
        cost = norm_cost(x.shape[0], x.shape[1], x.element_size(), adds=False)
        return self._trace("norm", cost, lambda: self._ops.rms_norm(x, norm_weight, eps))

    def add_rms_norm(self, delta: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        cost = norm_cost(delta.shape[0], delta.shape[1], delta.element_size(), adds=True)
        return self._trace("add and norm", cost, lambda: self._ops.add_rms_norm(delta, residual, norm_weight, eps))

    def layer_norm(self, x: Tensor, norm_weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        cost = norm_cost(x.shape[0], x.shape[1], x.element_size(), adds=False)
        return self._trace("norm", cost, lambda: self._ops.layer_norm(x, norm_weight, bias, eps))

    def head_norm(self, x: Tensor, norm: HeadNorm) -> None:
        cost = norm_cost(x.shape[0], norm.groups * norm.size, x.element_size(), adds=False)
        self._trace("head norm", cost, lambda: self._ops.head_norm(x, norm))

    def add(self, delta: Tensor, residual: Tensor) -> None:
        moved = Cost(0, 3 * residual.numel() * residual.element_size())
        self._trace("add", moved, lambda: self._ops.add(delta, residual))

    def add_positions(self, x: Tensor, table: Tensor, plan: P) -> None:
        moved = Cost(0, 3 * x.numel() * x.element_size())
        self._trace("positions", moved, lambda: self._ops.add_positions(x, table, plan))

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return self._product("product", x, weight, lambda: self._ops.linear(x, weight))

    def add_linear(self, x: Tensor, weight: Weight, residual: Tensor) -> Tensor | None:
        """Call the wrapped `add_linear` in a named range, and count its cost. If the call adds the residual itself (and
        returns None), the cost includes reading the residual; otherwise the next norm reads it."""
        left = self._product("product", x, weight, lambda: self._ops.add_linear(x, weight, residual))
        if left is None:
            self._add(_product_name("product", x, weight), Cost(0, residual.numel() * residual.element_size()))
        return left

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        pages: Tensor,
        layer: int,
        plan: P,
        shape: HeadShape,
        rope: RopeTables,
        norm: QkNormWeights | None,
    ) -> Tensor:
        """Call the wrapped `qk_norm_rope_write` in the range "norm, rope and page write", and count its cost."""
        return self._trace(
            "norm, rope and page write",
            rope_cost(qkv.shape[0], shape, qkv.element_size(), pages.element_size()),
            lambda: self._ops.qk_norm_rope_write(qkv, pages, layer, plan, shape, rope, norm),
        )

    def paged_attention(
        self, query: Tensor, pages: Tensor, layer: int, plan: P, shape: HeadShape, rules: AttentionRules
    ) -> Tensor:
        """Call the wrapped `paged_attention` in the range "attention", and count its cost. The costs of decoding and
        prefilling sequences are also counted apart, since on a GPU their kernels differ. `rules` do not change the
        costs: a row counts as if it saw all positions up to its own."""
        costs = [attention_cost(each, shape, query.element_size(), pages.element_size()) for each in self._attended]
        # On a GPU the kernels tell the two apart, elsewhere nothing does.
        for name, cost in zip((DECODE_ATTENTION, PREFILL_ATTENTION), costs, strict=True):
            self._add(name, cost)
        whole = Cost(1, sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs))
        return self._trace(ATTENTION, whole, lambda: self._ops.paged_attention(query, pages, layer, plan, shape, rules))

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> None:
        cost = activation_cost(x.shape[0], x.shape[1], x.element_size(), gated=True)
        self._trace("output gate", cost, lambda: self._ops.sigmoid_gate(x, gate))

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        """Call the wrapped `gated_linear` in a range named by the weight's sizes, and count its cost."""
        cost = gated_product_cost(x.shape[0], weight, x.element_size())
        name = _product_name("gated product", x, weight)
        return self._trace(name, cost, lambda: self._ops.gated_linear(x, weight, activation))

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        cost = activation_cost(x.shape[0], x.shape[1], x.element_size(), gated=False)
        return self._trace("activation", cost, lambda: self._ops.activation(x, activation))

    def lm_head(self, x: Tensor, weight: Weight, softcap: float) -> Tensor:
        return self._product("head", x, weight, lambda: self._ops.lm_head(x, weight, softcap))

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Int32:
        cost = logits_cost(logits.shape[0], logits.shape[1], logits.element_size())
        return self._trace("sample", cost, lambda: self._ops.sample(logits, columns))

    def logprobs(self, logits: Tensor, token: Int32, wanted: Int32) -> LogprobColumns | None:
        """Call the wrapped `logprobs`, and return its result. If some row wants logprobs, the call is in a named range
        and its cost is counted."""
        if not (wanted >= 0).any():
            return self._ops.logprobs(logits, token, wanted)
        cost = logits_cost(logits.shape[0], logits.shape[1], logits.element_size())
        return self._trace(LOGPROBS, cost, lambda: self._ops.logprobs(logits, token, wanted))

    def _product(self, name: str, x: Tensor, weight: Weight, call: Callable[[], R]) -> R:
        cost = product_cost(x.shape[0], weight, x.element_size())
        return self._trace(_product_name(name, x, weight), cost, call)

    def _trace(self, name: str, cost: Cost, call: Callable[[], R]) -> R:
        """Add the cost to that of the name, and return the call's result, made inside a named range of the profiler."""
        self._add(name, cost)
        with record_function(PREFIX + name):
            return call()

    def _add(self, name: str, cost: Cost) -> None:
        self.costs[name] = self.costs.get(name, Cost()) + cost


def _product_name(name: str, x: Tensor, weight: Weight) -> str:
    return f"{name} {weight.outputs} x {x.shape[1]}"


def traced(ops: Any, attended: tuple[Attended, Attended]) -> TracedOps[Any]:
    """Wrap any ops. The type of their plan stays private to them."""
    return TracedOps(ops, attended)

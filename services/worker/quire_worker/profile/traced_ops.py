"""TracedOps: any `Ops` with a named range around each call, and what each call must move and compute at the least.

The floor of a call counts what it reads and writes once, and its multiplications and additions: nothing that a smarter
way of computing the same could leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.profiler import record_function

from quire_worker.model.arch_spec import Activation
from quire_worker.ops.interface import HeadShape, Ops, P, QkGains, RopeTables
from quire_worker.ops.weight import Weight
from quire_worker.sampling.columns import SamplingColumns
from quire_worker.step import Int32, LogprobColumns

PREFIX = "quire: "
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of all calls of one name in a step."""

    calls: int = 0
    bytes: int = 0
    flops: int = 0

    def and_one(self, num_bytes: int, flops: int) -> Cost:
        """With another call."""
        return Cost(self.calls + 1, self.bytes + num_bytes, self.flops + flops)


class TracedOps(Generic[P]):
    """See `Ops`. `keys`: positions that a step's sequences attend to, in all; `pairs`: of rows and positions."""

    def __init__(self, ops: Ops[P], keys: int, pairs: int) -> None:
        self._ops = ops
        self._keys = keys
        self._pairs = pairs
        self.costs: dict[str, Cost] = {}

    @property
    def row_multiple(self) -> int:
        """See `Ops`."""
        return self._ops.row_multiple

    @property
    def batch_invariant(self) -> bool:
        """See `Ops`."""
        return self._ops.batch_invariant

    def prepare(self, weight: Weight) -> None:
        """See `Ops`."""
        self._ops.prepare(weight)

    def plan(self, pages: Tensor, rows: int, position: Int32, count: Int32, page_table: Int32) -> P:
        """See `Ops`."""
        return self._ops.plan(pages, rows, position, count, page_table)

    def embedding(self, token: Tensor, weight: Tensor, scale: float) -> Tensor:
        """See `Ops`."""
        moved = 2 * token.shape[0] * weight.shape[1] * weight.element_size()
        return self._trace("embedding", moved, 0, lambda: self._ops.embedding(token, weight, scale))

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """See `Ops`."""
        return self._trace("norm", 2 * x.nbytes, 0, lambda: self._ops.rms_norm(x, gain, eps))

    def add_rms_norm(self, delta: Tensor, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        """See `Ops`."""
        return self._trace(
            "add and norm", 4 * delta.nbytes, 0, lambda: self._ops.add_rms_norm(delta, residual, gain, eps)
        )

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """See `Ops`."""
        return self._product("product", x, weight, lambda: self._ops.linear(x, weight))

    def qk_norm_rope_write(
        self, qkv: Tensor, pages: Tensor, layer: int, plan: P, shape: HeadShape, rope: RopeTables, norm: QkGains | None
    ) -> Tensor:
        """See `Ops`."""
        written = 2 * qkv.shape[0] * shape.kv_heads * shape.head_dim * pages.element_size()
        read = qkv.shape[0] * shape.heads * shape.head_dim * qkv.element_size()
        return self._trace(
            "norm, rope and page write",
            qkv.nbytes + read + written,
            0,
            lambda: self._ops.qk_norm_rope_write(qkv, pages, layer, plan, shape, rope, norm),
        )

    def paged_attention(
        self, query: Tensor, pages: Tensor, layer: int, plan: P, shape: HeadShape, window: int
    ) -> Tensor:
        """See `Ops`."""
        moved = 2 * self._keys * shape.kv_heads * shape.head_dim * pages.element_size() + 2 * query.nbytes
        return self._trace(
            "attention",
            moved,
            4 * self._pairs * shape.heads * shape.head_dim,
            lambda: self._ops.paged_attention(query, pages, layer, plan, shape, window),
        )

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See `Ops`."""
        moved = gate_up.nbytes * 3 // 2
        return self._trace("activation", moved, 0, lambda: self._ops.gated_activation(gate_up, activation))

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """See `Ops`."""
        return self._trace("activation", 2 * x.nbytes, 0, lambda: self._ops.activation(x, activation))

    def lm_head(self, x: Tensor, weight: Weight, softcap: float) -> Tensor:
        """See `Ops`."""
        return self._product("head", x, weight, lambda: self._ops.lm_head(x, weight, softcap))

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Int32:
        """See `Ops`."""
        return self._trace("sample", logits.nbytes, 0, lambda: self._ops.sample(logits, columns))

    def logprobs(self, logits: Tensor, token: Int32, wanted: Int32) -> LogprobColumns | None:
        """See `Ops`."""
        return self._ops.logprobs(logits, token, wanted)

    def _product(self, name: str, x: Tensor, weight: Weight, call: Callable[[], Tensor]) -> Tensor:
        rows, inputs = x.shape
        outputs = weight.outputs
        moved = weight.data.nbytes + x.nbytes + rows * outputs * x.element_size()
        return self._trace(f"{name} {outputs} x {inputs}", moved, 2 * rows * inputs * outputs, call)

    def _trace(self, name: str, num_bytes: int, flops: int, call: Callable[[], R]) -> R:
        self.costs[name] = self.costs.get(name, Cost()).and_one(num_bytes, flops)
        with record_function(PREFIX + name):
            return call()


def traced(ops: Any, keys: int, pairs: int) -> TracedOps[Any]:
    """Any: the plan's type is the ops' own affair."""
    return TracedOps(ops, keys, pairs)

"""`Ops` for the CPU with compiled kernels where torch would walk over memory several times; the rest is torch's.

The torch reference computes the same by plain means; tests compare the two. Exactness is the same: a row's results
depend on its own sequence alone, to the bit.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from quire_common.credit import LogprobColumns
from quire_worker.arrays import Float32, Int32
from quire_worker.model.arch_spec import Activation
from quire_worker.ops import cpu_attention, cpu_rows, cpu_tile
from quire_worker.ops.cpu_plan import CpuPlan, item_tokens, plan_step
from quire_worker.ops.cpu_threads import CpuThreads
from quire_worker.ops.interface import HeadShape, QkNormWeights, RopeTables
from quire_worker.ops.scratch import Scratch
from quire_worker.ops.simd import LANES
from quire_worker.ops.torch_reference import TorchOps
from quire_worker.ops.weight import Weight
from quire_worker.sampling.columns import SamplingColumns

_NO_NORM_WEIGHT: Final = np.zeros(0, np.float32)
_PAIR_COST: Final = 8
"""Of a (query, key) pair with 64 numbers per head; see CpuThreads."""


class CpuOps:
    """Implements `Ops`. One object per model, used by a single thread; making it compiles the kernels."""

    def __init__(self, shape: HeadShape, page_size: int) -> None:
        self._torch = TorchOps(shape, page_size)
        self.row_multiple = self._torch.row_multiple
        self.batch_invariant = True
        self._group = shape.heads // shape.kv_heads
        self._threads = CpuThreads()
        self._scratch = Scratch()
        self._most_rows = item_tokens(self._group) * self._group
        floats = cpu_attention.scratch_floats(self._most_rows, shape.head_dim)
        self._tile_memory = [
            (np.zeros(2 * cpu_tile.TILE, np.int64), np.zeros(floats, np.float32)) for _ in range(self._threads.count)
        ]
        self._compile(shape, page_size)

    @staticmethod
    def supports(shape: HeadShape) -> bool:
        """Whether the kernels can compute heads of this size."""
        return shape.head_dim % LANES == 0

    @property
    def depends_on_threads(self) -> bool:
        """Whether fewer torch threads than there were when this was made give other bits, with the weights that were
        prepared. Kernels never do (see CpuThreads)."""
        return self._torch.gemms_depend_on_threads

    def prepare(self, weight: Weight) -> None:
        self._torch.prepare(weight)

    def plan(self, pages: Tensor, rows: int, position: Int32, count: Int32, page_table: Int32) -> CpuPlan:
        return plan_step(pages, rows, position, count, page_table, self._group)

    def embedding(self, token: Tensor, weight: Tensor, scale: float) -> Tensor:
        return self._torch.embedding(token, weight, scale)

    def rms_norm(self, x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        if size % LANES:
            return self._torch.rms_norm(x, norm_weight, eps)
        out = torch.empty_like(x)
        self._threads.rows(
            cpu_rows.norm_rows, rows, size, _flat(x), _flat(norm_weight), np.float32(eps), size, _flat(out)
        )
        return out

    def add_rms_norm(self, delta: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        rows, size = residual.shape
        if size % LANES:
            return self._torch.add_rms_norm(delta, residual, norm_weight, eps)
        out = torch.empty_like(residual)
        self._threads.rows(
            cpu_rows.add_norm_rows,
            rows,
            size,
            _flat(delta),
            _flat(residual),
            _flat(norm_weight),
            np.float32(eps),
            size,
            _flat(out),
        )
        return out

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return self._torch.linear(x, weight)

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        pages: Tensor,
        layer: int,
        plan: CpuPlan,
        shape: HeadShape,
        rope: RopeTables,
        norm: QkNormWeights | None,
    ) -> Tensor:
        out = self._scratch.take("query", plan.rows, shape.heads * shape.head_dim)
        self._threads.rows(
            cpu_rows.rope_write_rows,
            plan.rows,
            qkv.shape[1],
            _flat(qkv),
            _flat(pages),
            plan.write_at,
            plan.position,
            _flat(rope.cos),
            _flat(rope.sin),
            norm is not None,
            _NO_NORM_WEIGHT if norm is None else _flat(norm.query),
            _NO_NORM_WEIGHT if norm is None else _flat(norm.key),
            np.float32(0.0 if norm is None else norm.eps),
            pages.stride(2) * layer,
            self._sizes(pages),
            _flat(out),
        )
        return out

    def paged_attention(
        self, query: Tensor, pages: Tensor, layer: int, plan: CpuPlan, shape: HeadShape, window: int
    ) -> Tensor:
        out = self._scratch.take("attended", plan.rows, shape.heads * shape.head_dim)
        out[plan.real_rows :].zero_()
        given = (
            _flat(query),
            _flat(pages),
            plan.table,
            plan.items,
            pages.stride(2) * layer,
            self._sizes(pages),
            np.float32(shape.score_scale),
            np.float32(shape.softcap),
            window,
        )
        target = _flat(out)
        self._threads.items(
            cpu_attention.attend,
            plan.cost * (shape.heads * shape.head_dim * _PAIR_COST // 64),
            lambda part: (*given, *self._tile_memory[part], target),
        )
        return out

    def add_linear(self, x: Tensor, weight: Weight, residual: Tensor) -> Tensor:
        """The norm that follows adds it."""
        return self.linear(x, weight)

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        return self.gated_activation(self.linear(x, weight), activation)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[R, 2 * I] -> [R, I] = activation(first half) * second half."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if activation != "silu" or size % LANES:
            return self._torch.gated_activation(gate_up, activation)
        out = self._scratch.take("gated", rows, size)
        self._threads.rows(cpu_rows.silu_gate_rows, rows, 2 * size, _flat(gate_up), size, _flat(out))
        return out

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        return self._torch.activation(x, activation)

    def lm_head(self, x: Tensor, weight: Weight, softcap: float) -> Tensor:
        return self._torch.lm_head(x, weight, softcap)

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Int32:
        return self._torch.sample(logits, columns)

    def logprobs(self, logits: Tensor, token: Int32, wanted: Int32) -> LogprobColumns | None:
        return self._torch.logprobs(logits, token, wanted)

    def _sizes(self, pages: Tensor) -> tuple[int, ...]:
        _, kv_heads, _, _, page_size, head_dim = pages.shape
        return (pages.stride(0), pages.stride(1), page_size, kv_heads, self._group, head_dim, self._most_rows)

    def _compile(self, shape: HeadShape, page_size: int) -> None:
        """Run every kernel once, on next to nothing, with arguments of the types that a step has."""
        pages = torch.zeros(2, shape.kv_heads, 1, 2, page_size, shape.head_dim)
        one = np.ones(1, np.int32)
        plan = self.plan(pages, 1, one - 1, one, one[:, None])
        rope = RopeTables(torch.ones(1, shape.head_dim // 2), torch.zeros(1, shape.head_dim // 2))
        norm_weight = torch.ones(shape.head_dim)
        qkv = torch.zeros(1, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        query = self.qk_norm_rope_write(qkv, pages, 0, plan, shape, rope, QkNormWeights(norm_weight, norm_weight, 1e-5))
        self.paged_attention(query, pages, 0, plan, shape, 0)
        row = torch.zeros(1, 2 * LANES)
        self.add_rms_norm(row, row.clone(), torch.ones(2 * LANES), 1e-5)
        self.rms_norm(row, torch.ones(2 * LANES), 1e-5)
        self.gated_activation(row, "silu")


def _flat(tensor: Tensor) -> Float32:
    """All numbers of a contiguous tensor, as kernels take them; `view` refuses others."""
    flat: Float32 = tensor.view(-1).numpy()
    return flat

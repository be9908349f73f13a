"""The cases of a decode step's kernels from token ids to logits: the kernels of each layer, the embedding and the head.
The gated linear layer is one kernel where the worker's tables have a config for it, else a GEMM and an activation. That
of prompts is here too, because it uses the same weights.

Weights, keys and values are cold (not in a cache). The output of one kernel is as warm for the next as in a step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from bench.gpu.kernel_table.kernel_case import CALLS, Bench, KernelCase, copies_of
from bench.gpu.shapes import products_of
from quire_worker.model.rope import rope_tables
from quire_worker.ops.interface import AttentionRules, HeadShape, QkNormWeights, RopeTables
from quire_worker.ops.triton.attention import decode_attention
from quire_worker.ops.triton.attention_plan import TritonPlan, plan_step
from quire_worker.ops.triton.kv_splits import LAST_MERGES_FROM
from quire_worker.ops.weight import DenseWeight
from quire_worker.profile.cost import (
    Attended,
    activation_cost,
    attention_cost,
    embedding_cost,
    gated_product_cost,
    norm_cost,
    product_cost,
    rope_cost,
)

ATTENTION_WANTED, _LEAST_KV_BYTES = 0.85, 100 << 20
"""Of memory's rate, where a layer's keys and values are so many bytes."""


class DecoderKernels:
    """The weights of one model, made once for all batches."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._shape = HeadShape.of(bench.spec)
        element = bench.dtype.itemsize
        self._weights = {
            role: [DenseWeight(bench.random(*size) * 0.02) for _ in range(copies_of(size[0] * size[1] * element))]
            for role, size in products_of(bench.spec).items()
        }

    def cases(self, batch: int, context: int) -> Iterator[KernelCase]:
        """Yield the cases of a step in which this many sequences decode, with this many tokens each."""
        yield self._embedding(batch)
        yield from self._norms(batch)
        for role in self._weights:
            if role == "gate_up" and self._gates_in_one_kernel(batch):
                yield self.gated_product(batch)
            else:
                yield self._product(role, batch)
        yield from self.attention(batch, context, alone=False)
        if not self._gates_in_one_kernel(batch):
            yield self._activation(batch)

    def attention(self, batch: int, context: int, *, alone: bool = True) -> Iterator[KernelCase]:
        """Yield the case of decode attention and, unless only that is wanted, of the kernel before it, which writes the
        pages."""
        bench, shape = self._bench, self._shape
        element = bench.dtype.itemsize
        cost = attention_cost(Attended.of(context - 1, 1).times(batch), shape, element, element)
        kv_bytes = 2 * batch * context * bench.spec.attention[0].kv_size * element
        layers = copies_of(kv_bytes)
        pages, plan = self._pages(batch, context, layers)
        if not alone:
            yield self._rope(batch, pages, plan, layers, context)
        query, out = (
            bench.random(batch, shape.heads * shape.head_dim),
            bench.random(batch, shape.heads * shape.head_dim),
        )

        def run(index: int) -> Tensor:
            decode_attention(query, pages, index % layers, plan, shape, AttentionRules(), out, bench.ops.pdl)
            return out

        yield KernelCase(
            f"decode attention {batch} x {context}",
            run,
            cost,
            launches=1 if batch >= LAST_MERGES_FROM else 2,
            wanted=ATTENTION_WANTED if kv_bytes >= _LEAST_KV_BYTES else 0.0,
        )

    def gated_product(self, rows: int) -> KernelCase:
        """Return the case of a gated linear layer: one kernel or, if the tables have none, a GEMM and an activation."""
        bench, weights = self._bench, self._weights["gate_up"]
        outputs, inputs = weights[0].data.shape
        x = bench.random(rows, inputs)
        cost = gated_product_cost(rows, weights[0], bench.dtype.itemsize)

        def run(index: int) -> Tensor:
            return bench.ops.gated_linear(x, weights[index % len(weights)], "silu")

        return KernelCase(f"gated product {outputs} x {inputs}, {rows} rows", run, cost)

    def _gates_in_one_kernel(self, rows: int) -> bool:
        weight = self._weights["gate_up"][0].data
        return self._bench.ops.gemm_configs.gated_config_for(rows, *weight.shape) is not None

    def _embedding(self, rows: int) -> KernelCase:
        bench, (table, *_) = self._bench, self._weights["head"]
        token = bench.ids(CALLS, rows)
        cost = embedding_cost(rows, bench.spec.hidden_size, bench.dtype.itemsize)
        return KernelCase("embedding", lambda index: bench.ops.embedding(token[index], table, 1.0), cost)

    def _norms(self, rows: int) -> Iterator[KernelCase]:
        bench, hidden = self._bench, self._bench.spec.hidden_size
        x, residual, norm_weight = bench.random(rows, hidden), bench.random(rows, hidden), bench.random(hidden)
        eps, element = bench.spec.norm.eps, bench.dtype.itemsize
        plain, adding = (norm_cost(rows, hidden, element, adds=adds) for adds in (False, True))
        yield KernelCase("norm", lambda _: bench.ops.rms_norm(x, norm_weight, eps), plain)
        yield KernelCase("add and norm", lambda _: bench.ops.add_rms_norm(x, residual, norm_weight, eps), adding)

    def _product(self, role: str, rows: int) -> KernelCase:
        bench, weights = self._bench, self._weights[role]
        outputs, inputs = weights[0].data.shape
        x = bench.random(rows, inputs)
        cost = product_cost(rows, weights[0], bench.dtype.itemsize)

        def run(index: int) -> Tensor:
            weight = weights[index % len(weights)]
            return bench.ops.lm_head(x, weight, 0.0) if role == "head" else bench.ops.linear(x, weight)

        return KernelCase(f"{role} {outputs} x {inputs}", run, cost)

    def _activation(self, rows: int) -> KernelCase:
        bench, inner = self._bench, self._bench.spec.intermediate_size
        gate_up = bench.random(rows, 2 * inner)
        cost = activation_cost(rows, inner, bench.dtype.itemsize, gated=True)
        return KernelCase("silu", lambda _: bench.ops.gated_activation(gate_up, "silu"), cost)

    def _rope(self, rows: int, pages: Tensor, plan: TritonPlan, layers: int, context: int) -> KernelCase:
        bench, shape, spec = self._bench, self._shape, self._bench.spec
        attention = spec.attention[0]
        rope = RopeTables(*(each.to(bench.device) for each in rope_tables(attention.rope, spec.head_dim, context)))
        norm_weights = QkNormWeights(bench.random(spec.head_dim), bench.random(spec.head_dim), spec.norm.eps)
        norm = norm_weights if attention.qk_norm else None
        qkv = bench.random(rows, attention.query_size + 2 * attention.kv_size)
        cost = rope_cost(rows, shape, bench.dtype.itemsize, bench.dtype.itemsize)

        def run(index: int) -> Tensor:
            return bench.ops.qk_norm_rope_write(qkv, pages, index % layers, plan, shape, rope, norm)

        return KernelCase("rope and page write", run, cost)

    def _pages(self, batch: int, context: int, layers: int) -> tuple[Tensor, TritonPlan]:
        """Return pages full of numbers, in random order."""
        bench, page = self._bench, self._bench.page_size
        each = -(-context // page)
        pages = bench.random(batch * each + 1, bench.spec.kv_heads, layers, 2, page, bench.spec.head_dim)
        table = 1 + np.random.default_rng(0).permutation(batch * each).astype(np.int32).reshape(batch, each)
        position, count = np.full(batch, context - 1, np.int32), np.ones(batch, np.int32)
        return pages, plan_step(bench.device, batch, position, count, table, self._shape)

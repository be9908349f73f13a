"""The cases of prefill attention, for prompts that begin in the step: by Triton's tiles over pages, and by torch's
attention (cuDNN).

The kernel before has just written their keys and values, so these are not cold.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from bench.gpu.kernel_table.kernel_case import Bench, KernelCase
from quire_worker.ops.interface import AttentionRules, HeadShape
from quire_worker.ops.triton.attention import prefill_attention
from quire_worker.ops.triton.attention_plan import TritonPlan, plan_step
from quire_worker.ops.triton.fresh_attention import PIECE, Fresh, best_backend, fresh_attention
from quire_worker.profile.cost import Attended, attention_cost


def prompt_cases(bench: Bench, prompts: int, tokens: int, *, fresh: bool) -> Iterator[KernelCase]:
    """Yield the cases with tiles; with `fresh`, also those with torch's attention."""
    shape, element = HeadShape.of(bench.spec), bench.dtype.itemsize
    cost = attention_cost(Attended.of(0, tokens).times(prompts), shape, element, element)
    rows = prompts * tokens
    query, out = (bench.random(rows + PIECE, shape.heads * shape.head_dim) for _ in range(2))
    each = -(-tokens // bench.page_size)
    pages = bench.random(prompts * each + 1, bench.spec.kv_heads, 1, 2, bench.page_size, bench.spec.head_dim)
    plan = _plan(bench, prompts, tokens, each)

    def tiled(_: int) -> Tensor:
        prefill_attention(query, pages, 0, plan, shape, AttentionRules(), out, bench.ops.pdl)
        return out[:rows]

    yield KernelCase(f"prefill attention {prompts} x {tokens}, tiles", tiled, cost)
    if not fresh:
        return
    chunks = tuple(Fresh(index * tokens, tokens) for index in range(prompts))
    attention = bench.spec.attention[0]
    qkv = bench.random(rows + PIECE, attention.query_size + 2 * attention.kv_size)

    def by_torch(_: int) -> Tensor:
        made: list[Tensor] = []
        with best_backend(pages):
            fresh_attention(query, qkv, chunks, shape, lambda chunk, chunk_rows: made.append(chunk_rows))
        return made[-1]

    name = "cuDNN" if bench.device.type == "cuda" else "torch"
    yield KernelCase(
        f"prefill attention {prompts} x {tokens}, {name}", by_torch, cost, launches=prompts, capturable=False
    )


def _plan(bench: Bench, prompts: int, tokens: int, each: int) -> TritonPlan:
    table = 1 + np.random.default_rng(0).permutation(prompts * each).astype(np.int32).reshape(prompts, each)
    position, count = np.zeros(prompts, np.int32), np.full(prompts, tokens, np.int32)
    return plan_step(bench.device, prompts * tokens, position, count, table, HeadShape.of(bench.spec))

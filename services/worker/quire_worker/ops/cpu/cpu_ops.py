"""`Ops` for the CPU with compiled kernels where torch would walk over memory several times; the rest is torch's.

The torch reference computes the same by plain means; tests compare the two. Exactness is the same: a row's results
depend on its own sequence alone, to the bit.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from quire_common.credit import LogprobColumns
from quire_worker.arrays import Int32, Int64
from quire_worker.model.arch_spec import Activation
from quire_worker.ops.cpu import attention, attention_tile, row_kernels
from quire_worker.ops.cpu.job import Job, compile_job, float_bits
from quire_worker.ops.cpu.kernel_team import TEAM
from quire_worker.ops.cpu.linear import (
    BLOCK,
    LINEAR_ARGUMENTS,
    TILES,
    compile_add_products,
    compile_embedding,
    compile_linear,
)
from quire_worker.ops.cpu.plan import PLAN_ARRAYS, CpuPlan, item_tokens, plan_step
from quire_worker.ops.cpu.simd import LANES
from quire_worker.ops.cpu.step_tape import StepTape
from quire_worker.ops.cpu.threads import CpuThreads
from quire_worker.ops.cpu.tile_weight import tile_weight
from quire_worker.ops.interface import HeadShape, QkNormWeights, RopeTables, RunLayers
from quire_worker.ops.scratch import Scratch
from quire_worker.ops.torch_reference import TorchOps
from quire_worker.ops.weight import TiledWeight, Tiles, Weight
from quire_worker.sampling.columns import SamplingColumns

_X, _ROWS, _OUT = (LINEAR_ARGUMENTS.index(name) for name in ("x", "rows", "out"))
_TAPE_ROWS: Final = 64
"""Steps of more rows compute for so long that Python between the kernels does not count."""
_PARTS_PER_THREAD: Final = 4
"""Attention is cut into so many parts for each thread, so that threads end at about the same time."""
_PAIR_COST: Final = 8
"""Cost of a (query, key) pair with 64 numbers per head; see CpuThreads."""


class CpuOps:
    """Implements `Ops`. One object per model, used by a single thread; making it compiles the kernels."""

    def __init__(self, shape: HeadShape, page_size: int) -> None:
        self._torch = TorchOps(shape, page_size)
        self.row_multiple = 1
        self.batch_invariant = True
        self._linear_jobs: dict[int, tuple[TiledWeight, list[_LinearJob]]] = {}
        self._embedding_jobs: dict[int, Job] = {}
        self._norm = Job(compile_job(row_kernels.norm_rows, "norm_rows"), 5)
        self._add_norm = Job(compile_job(row_kernels.add_norm_rows, "add_norm_rows"), 6)
        self._silu_gate = Job(compile_job(row_kernels.silu_gate_rows, "silu_gate_rows"), 3)
        self._rope_write = Job(compile_job(row_kernels.rope_write_rows, "rope_write_rows"), 17)
        self._attend = Job(compile_job(attention.attend_parts, "attend_parts"), 17)
        self._group = shape.heads // shape.kv_heads
        self._pair_cost = shape.heads * shape.head_dim * _PAIR_COST // 64
        self._threads = CpuThreads()
        self._scratch = Scratch()
        self._most_rows = item_tokens(self._group) * self._group
        floats = attention.scratch_floats(self._most_rows, shape.head_dim)
        self._most_parts = _PARTS_PER_THREAD * self._threads.count if self._threads.count > 1 else 1
        self._plan: Int64 = np.zeros(len(PLAN_ARRAYS), np.int64)
        """Addresses of the arrays of the plan in hand."""
        self._attend_scratch = np.zeros((self._most_parts, floats), np.float32)
        self._attend_places = np.zeros((self._most_parts, 2 * attention_tile.TILE), np.int64)

    @staticmethod
    def supports(shape: HeadShape) -> bool:
        """Whether the kernels can compute heads of this size."""
        return shape.head_dim % LANES == 0

    def prepare(self, weight: Weight, *, embeds: bool = False) -> TiledWeight:
        """Repack the weight into tiles and compile the kernels for its storage; `embeds`: the embedding kernel, too."""
        tiled = weight if isinstance(weight, TiledWeight) else tile_weight(weight)
        self._linear_jobs[id(tiled)] = tiled, [_LinearJob(tiled, segment) for segment in tiled.segments]
        if embeds:
            (tiles,) = tiled.segments
            function = compile_embedding(tiles.storage, tiles.data.dtype, tiles.scale.dtype)
            self._embedding_jobs[id(tiled)] = Job(function, 8)
        return tiled

    def plan(self, pages: Tensor, rows: int, position: Int32, count: Int32, page_table: Int32) -> CpuPlan:
        return plan_step(pages, rows, position, count, page_table, self._group, self._most_parts)

    def capture(self, run: RunLayers[CpuPlan]) -> RunLayers[CpuPlan]:
        tapes: dict[tuple[int, int], StepTape] = {}
        """By rows and threads."""

        def replay(token: Tensor, pages: Tensor, plan: CpuPlan) -> tuple[Tensor, Tensor | None]:
            if plan.rows > _TAPE_ROWS or plan.rows > plan.real_rows:
                return run(token, pages, plan)
            size, key = (plan.rows, torch.get_num_threads()), (self._scratch.replaced, pages.data_ptr())
            tape = tapes.get(size)
            if tape is None or tape.key != key:
                if tape is not None:
                    tapes.clear()  # they hold buffers that were replaced
                tape = StepTape(plan.rows, key)
                result = self._record(run, tape, token, pages, plan)
                if key[0] == self._scratch.replaced:  # else the tape's buffers are gone
                    tapes[size] = tape
                return result
            if not tape.complete:
                return run(token, pages, plan)
            self._use(plan)
            tape.token.copy_(token)
            count, cost = self._attention_items(plan)
            tape.set_items(self._attend, count, cost, self._threads.threads(cost, count))
            TEAM.run(tape.jobs.reshape(-1))
            return tape.result

        return replay

    def _record(
        self, run: RunLayers[CpuPlan], tape: StepTape, token: Tensor, pages: Tensor, plan: CpuPlan
    ) -> tuple[Tensor, Tensor | None]:
        """Run and record."""
        tape.token.copy_(token)
        with self._threads.recording(tape):
            tape.record(lambda given: run(given, pages, plan))
        return tape.result

    def embedding(self, token: Tensor, weight: Weight, scale: float) -> Tensor:
        tiled = _tiled(weight)
        (tiles,) = tiled.segments
        rows, out = token.numel(), self._scratch.take("residual", token.numel(), tiled.inputs)
        self._threads.run(
            self._embedding_jobs[id(tiled)],
            rows,
            rows * tiled.inputs * LANES,
            _address(token),
            *(each.ctypes.data for each in (tiles.data, tiles.scale, tiles.offset)),
            tiled.blocks,
            _address(out),
            tiled.inputs,
            float_bits(scale),
        )
        return out

    def rms_norm(self, x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        if size % LANES:
            return self._torch.rms_norm(x, norm_weight, eps)
        out = self._scratch.take("normed", rows, size)
        given = _address(x), _address(norm_weight), _address(out), size, float_bits(eps)
        self._threads.run(self._norm, rows, rows * size, *given)
        return out

    def add_rms_norm(self, delta: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        rows, size = residual.shape
        if size % LANES:
            return self._torch.add_rms_norm(delta, residual, norm_weight, eps)
        out = self._scratch.take("normed", rows, size)
        given = _address(delta), _address(residual), _address(norm_weight), _address(out), size, float_bits(eps)
        self._threads.run(self._add_norm, rows, rows * size, *given)
        return out

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        tiled = _tiled(weight)
        return self._linear_into(x, tiled, self._scratch.take("product", x.shape[0], tiled.bias.size))

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
        query_norm, key_norm = (norm.query, norm.key) if norm else (out, out)
        page_size, head_dim = pages.shape[4:]
        self._threads.run(
            self._rope_write,
            plan.rows,
            plan.rows * qkv.shape[1],
            _address(qkv),
            _address(pages),
            _address(out),
            _address(rope.cos),
            _address(rope.sin),
            _address(query_norm),
            _address(key_norm),
            self._use(plan),
            plan.real_rows,
            norm is not None,
            float_bits(norm.eps if norm else 0.0),
            pages.stride(2) * layer,
            pages.stride(1),
            page_size,
            shape.kv_heads,
            self._group,
            head_dim,
        )
        return out

    def paged_attention(
        self, query: Tensor, pages: Tensor, layer: int, plan: CpuPlan, shape: HeadShape, window: int
    ) -> Tensor:
        out = self._scratch.take("attended", plan.rows, shape.heads * shape.head_dim)
        if plan.rows > plan.real_rows:
            out[plan.real_rows :].zero_()
        page_size, head_dim = pages.shape[4:]
        self._threads.run(
            self._attend,
            *self._attention_items(plan),
            _address(query),
            _address(pages),
            _address(out),
            self._use(plan),
            self._attend_scratch.ctypes.data,
            self._attend_places.ctypes.data,
            pages.stride(2) * layer,
            pages.stride(0),
            pages.stride(1),
            page_size,
            shape.kv_heads,
            self._group,
            head_dim,
            self._most_rows,
            float_bits(shape.score_scale),
            float_bits(shape.softcap),
            window,
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
        cost = 2 * rows * size
        self._threads.run(self._silu_gate, rows, cost, _address(gate_up), _address(out), size)
        return out

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        return self._torch.activation(x, activation)

    def lm_head(self, x: Tensor, weight: Weight, softcap: float) -> Tensor:
        tiled = _tiled(weight)
        logits = self._linear_into(x, tiled, torch.empty(x.shape[0], tiled.bias.size))
        return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Int32:
        return self._torch.sample(logits, columns)

    def logprobs(self, logits: Tensor, token: Int32, wanted: Int32) -> LogprobColumns | None:
        return self._torch.logprobs(logits, token, wanted)

    def _use(self, plan: CpuPlan) -> int:
        """Make this the plan that kernels see; the address of its arrays' addresses."""
        self._plan[:] = plan.addresses()
        return self._plan.ctypes.data

    def _attention_items(self, plan: CpuPlan) -> tuple[int, int]:
        """The number of the plan's parts and their cost."""
        return plan.cuts.size - 1, plan.cost * self._pair_cost

    def _linear_into(self, x: Tensor, weight: TiledWeight, out: Tensor) -> Tensor:
        """Compute x @ weight.T + bias into `out` [R, outputs of all tiles]; return it without the padding outputs."""
        rows, size = x.shape[0], weight.blocks * BLOCK
        if size != weight.inputs:
            x = functional.pad(x, (0, size - weight.inputs))
        x = x.contiguous()
        padded = weight.bias.size
        for job in self._linear_jobs[id(weight)][1]:
            arguments = job.arguments
            arguments[_X], arguments[_ROWS], arguments[_OUT] = x.data_ptr(), rows, out.data_ptr()
            self._threads.run(job, job.tiles, job.tiles * rows * size)
        return out if padded == weight.outputs else out[:, : weight.outputs].contiguous()


class _LinearJob(Job):
    """The linear job of one segment. Of its arguments only x, rows and out change between calls."""

    def __init__(self, weight: TiledWeight, segment: Tiles) -> None:
        super().__init__(
            compile_linear(segment.storage, segment.data.dtype, segment.scale.dtype), len(LINEAR_ARGUMENTS), TILES
        )
        bias = weight.bias[segment.first_output :]
        given = {name: each.ctypes.data for name, each in (("data", segment.data), ("scale", segment.scale))}
        given |= {"offset": segment.offset.ctypes.data, "bias": bias.ctypes.data, "blocks": weight.blocks}
        given |= {"out_stride": weight.bias.size, "first_output": segment.first_output}
        given |= {"add_products": compile_add_products()}
        self.arguments[:] = [given.get(name, 0) for name in LINEAR_ARGUMENTS]
        self.tiles = segment.num_tiles


def _tiled(weight: Weight) -> TiledWeight:
    if not isinstance(weight, TiledWeight):
        raise TypeError(f"not prepared: {type(weight).__name__}")
    return weight


def _address(tensor: Tensor) -> int:
    """The address of the first element. Raises ValueError for a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError("the kernels take contiguous tensors")
    return tensor.data_ptr()

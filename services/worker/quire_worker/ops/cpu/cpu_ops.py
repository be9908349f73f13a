"""Implements `Ops` on the CPU: by compiled kernels where torch would read memory several times, else by torch.

The torch reference does the same with plain operations, and tests compare the two. The bits of a row's results depend
on its own sequence alone; with the torch reference, this holds only where its `batch_invariant` is true.
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
from quire_worker.ops.cpu.job import FLOAT_BYTES, Job, JobKernel, compile_job_kernel, float_to_bits
from quire_worker.ops.cpu.job_runner import JobRunner
from quire_worker.ops.cpu.kernel_thread_pool import THREAD_POOL
from quire_worker.ops.cpu.linear import (
    BLOCK_SIZE,
    LINEAR_ARGUMENTS,
    MICROKERNEL_TILES,
    compile_embedding,
    compile_linear,
    compile_macrokernel,
)
from quire_worker.ops.cpu.plan import PLAN_ARRAYS, CpuPlan, max_item_tokens, plan_step
from quire_worker.ops.cpu.simd import LANES
from quire_worker.ops.cpu.step_tape import StepTape
from quire_worker.ops.cpu.tile_weight import tile_weight
from quire_worker.ops.interface import AttentionRules, HeadNorm, HeadShape, QkNormWeights, RopeTables, RunLayers
from quire_worker.ops.scratch import Scratch
from quire_worker.ops.torch_reference import TorchOps
from quire_worker.ops.weight import TiledWeight, Tiles, Weight
from quire_worker.sampling.columns import SamplingColumns

_X_ARGUMENT, _ROWS_ARGUMENT, _OUT_ARGUMENT = (LINEAR_ARGUMENTS.index(name) for name in ("x", "rows", "out"))
_PARTS_PER_THREAD: Final = 4
"""Parts of a step's attention for each thread. There are several, so that threads end at about the same time."""
_PAIR_COST_NS: Final = 8
"""Estimated cost of a (query, key) pair of one head if D is 64; see `JobRunner.run_job`."""


class CpuOps:
    """The CPU's `Ops` of one model. One thread at a time may call it. The constructor compiles kernels."""

    def __init__(self, shape: HeadShape, page_size: int) -> None:
        self._torch_ops = TorchOps(shape, page_size)
        self.row_multiple = 1
        # Steps of more rows compute so long that Python between the kernels costs little.
        self.max_recorded_rows = 64
        self.batch_invariant = True
        self._linear_jobs: dict[int, tuple[TiledWeight, list[_LinearJob]]] = {}
        self._embedding_jobs: dict[int, Job] = {}
        self._norm = Job(compile_job_kernel(row_kernels.rms_norm_rows, "rms_norm_rows"), 5)
        self._add_norm = Job(compile_job_kernel(row_kernels.add_rms_norm_rows, "add_rms_norm_rows"), 6)
        self._kernels: dict[str, Job] = {}
        """Kernels that not every model needs, compiled at their first use."""
        self._silu_and_mul = Job(compile_job_kernel(row_kernels.silu_and_mul_rows, "silu_and_mul_rows"), 3)
        self._rope_write = Job(compile_job_kernel(row_kernels.rope_write_rows, "rope_write_rows"), 18)
        self._attend = Job(compile_job_kernel(attention.attend_parts, "attend_parts"), 20)
        self._group = shape.heads // shape.kv_heads
        self._pair_cost_ns = shape.heads * shape.head_dim * _PAIR_COST_NS // 64
        self._runner = JobRunner()
        self._scratch = Scratch()
        self._max_item_rows = max_item_tokens(self._group) * self._group
        scratch_floats = attention.scratch_floats(self._max_item_rows, shape.head_dim)
        self._max_parts = _PARTS_PER_THREAD * self._runner.max_threads if self._runner.max_threads > 1 else 1
        self._plan_addresses: Int64 = np.zeros(len(PLAN_ARRAYS), np.int64)
        """The addresses of the arrays of the present plan. Jobs hold the address of this array, so it never moves."""
        self._attend_scratch = np.zeros((self._max_parts, scratch_floats), np.float32)
        self._attend_key_offsets = np.zeros((self._max_parts, 2 * attention_tile.TILE), np.int64)

    @staticmethod
    def supports(shape: HeadShape) -> bool:
        """Return whether the kernels can compute heads of this size."""
        return shape.head_dim % LANES == 0

    def prepare(self, weight: Weight, *, embeds: bool = False) -> TiledWeight:
        """Repack the weight into tiles, unless it is tiled already, and compile its linear kernels. `embeds`: compile
        its embedding kernel too; the weight must then be of one storage kind. Returns the tiled weight, which the other
        methods take."""
        tiled = weight if isinstance(weight, TiledWeight) else tile_weight(weight)
        self._linear_jobs[id(tiled)] = tiled, [_LinearJob(tiled, segment) for segment in tiled.segments]
        if embeds:
            (tiles,) = tiled.segments
            function = compile_embedding(tiles.storage, tiles.data.dtype, tiles.scale.dtype)
            self._embedding_jobs[id(tiled)] = Job(function, 8)
        return tiled

    def plan(self, pages: Tensor, rows: int, position: Int32, count: Int32, page_table: Int32) -> CpuPlan:
        """Return the plan of a step's attention; see `Ops.plan`. It has at most four parts per thread, or one part with
        a single thread."""
        return plan_step(pages, rows, position, count, page_table, self._group, self._max_parts)

    def positions(self, plan: CpuPlan) -> Tensor:
        return torch.from_numpy(plan.position)

    def capture(self, run: RunLayers[CpuPlan]) -> RunLayers[CpuPlan]:
        """Return a function that computes the same as `run`, from a recorded tape of jobs where it can.

        The first step with a number of rows and of threads runs and is recorded; later ones replay the tape. Steps of
        more than 64 rows or with padding rows call `run`. So do passes in which torch itself computed something. A
        recording that replaced a scratch buffer is not kept, and the next such step is recorded again. Once a scratch
        buffer or the page pool was replaced, no tape recorded before is replayed.
        """
        tapes: dict[tuple[int, int], StepTape] = {}
        """By number of rows and of threads."""

        def replay(token: Tensor, pages: Tensor, plan: CpuPlan) -> tuple[Tensor, Tensor | None]:
            """Replay the tape for the step's number of rows and threads. Without a valid tape, run and record the pass;
            a recording that replaced scratch buffers itself is not kept. A replay returns the tensors of the recorded
            pass, which the next pass overwrites. Call `run` if the step or its tape cannot be replayed."""
            if plan.rows > self.max_recorded_rows or plan.rows > plan.real_rows:
                return run(token, pages, plan)
            tape_key, buffer_version = (plan.rows, torch.get_num_threads()), (self._scratch.replaced, pages.data_ptr())
            tape = tapes.get(tape_key)
            if tape is None or tape.buffer_version != buffer_version:
                if tape is not None:
                    tapes.clear()  # all tapes hold buffers that were replaced
                tape = StepTape(plan.rows, buffer_version)
                result = self._record_tape(run, tape, token, pages, plan)
                if buffer_version[0] == self._scratch.replaced:  # else the pass itself replaced buffers
                    tapes[tape_key] = tape
                return result
            if not tape.is_complete:
                return run(token, pages, plan)
            self._set_plan(plan)
            tape.token.copy_(token)
            num_items, cost_ns = self._attention_parts(plan)
            tape.set_job_items(self._attend, num_items, cost_ns, self._runner.threads_for(cost_ns, num_items))
            THREAD_POOL.run_jobs(tape.jobs.reshape(-1))
            return tape.result

        return replay

    def _record_tape(
        self, run: RunLayers[CpuPlan], tape: StepTape, token: Tensor, pages: Tensor, plan: CpuPlan
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass on a copy of `token` in the tape's memory, record its jobs on the tape, and return its result."""
        tape.token.copy_(token)
        with self._runner.recording(tape):
            tape.record_pass(lambda tape_token: run(tape_token, pages, plan))
        return tape.result

    def embedding(self, token: Tensor, weight: Weight, scale: float) -> Tensor:
        """Return the tokens' rows of the tiled weight times `scale`, [R, H] in scratch memory. The weight must have
        been prepared with `embeds`."""
        tiled = _require_tiled(weight)
        (tiles,) = tiled.segments
        rows, out = token.numel(), self._scratch.buffer("residual", token.numel(), tiled.inputs)
        self._runner.run_job(
            self._embedding_jobs[id(tiled)],
            rows,
            rows * tiled.inputs * LANES,
            _address(token),
            *(each.ctypes.data for each in (tiles.data, tiles.scale, tiles.offset)),
            tiled.blocks,
            _address(out),
            tiled.inputs,
            float_to_bits(scale),
        )
        return out

    def rms_norm(self, x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of x [R, H] in scratch memory, by a compiled kernel; by torch if H is no multiple of
        16."""
        rows, size = x.shape
        if size % LANES:
            return self._torch_ops.rms_norm(x, norm_weight, eps)
        out = self._scratch.buffer("normed", rows, size)
        arguments = _address(x), _address(norm_weight), _address(out), size, float_to_bits(eps)
        self._runner.run_job(self._norm, rows, rows * size, *arguments)
        return out

    def add_rms_norm(self, delta: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """Add delta to residual [R, H] in place and return the residual's RMS norm, by one compiled kernel. torch
        computes it if H is no multiple of 16."""
        rows, size = residual.shape
        if size % LANES:
            return self._torch_ops.add_rms_norm(delta, residual, norm_weight, eps)
        out = self._scratch.buffer("normed", rows, size)
        arguments = _address(delta), _address(residual), _address(norm_weight), _address(out), size, float_to_bits(eps)
        self._runner.run_job(self._add_norm, rows, rows * size, *arguments)
        return out

    def layer_norm(self, x: Tensor, norm_weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the layer norm of x [R, H]: by a compiled kernel, in scratch memory, or in new memory by torch if H is
        no multiple of 16."""
        rows, size = x.shape
        if size % LANES:
            return self._torch_ops.layer_norm(x, norm_weight, bias, eps)
        out = self._scratch.buffer("normed", rows, size)
        self._run_norm(x, out, HeadNorm(0, 1, size, eps, True, norm_weight, bias))
        return out

    def head_norm(self, x: Tensor, norm: HeadNorm) -> None:
        self._run_norm(x, x, norm)

    def add(self, delta: Tensor, residual: Tensor) -> None:
        """Add delta to residual [R, H] in place, by a compiled kernel; by torch if H is no multiple of 16."""
        rows, size = residual.shape
        if size % LANES:
            residual.add_(delta)
            return
        self._run_kernel(row_kernels.add_rows, rows, rows * size, _address(delta), _address(residual), size)

    def add_positions(self, x: Tensor, table: Tensor, plan: CpuPlan) -> None:
        """Add the row of `table` for each row's position to x [R, H] in place, by a compiled kernel; by torch if H is
        no multiple of 16."""
        rows, size = x.shape
        if size % LANES:
            x.add_(table.index_select(0, self.positions(plan)))
            return
        arguments = _address(x), _address(table), self._set_plan(plan), size
        self._run_kernel(row_kernels.add_position_rows, rows, rows * size, *arguments)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        tiled = _require_tiled(weight)
        return self._linear_into(x, tiled, self._scratch.buffer("linear", x.shape[0], tiled.bias.size))

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
        """Norm and rotate queries and keys, and write keys and values to the layer's pages, by one compiled kernel. A
        norm before the rotation is computed in `qkv` itself. Returns queries [R, Q * D] in scratch memory; see
        `Ops.qk_norm_rope_write`."""
        out = self._scratch.buffer("query", plan.rows, shape.heads * shape.head_dim)
        query_norm, key_norm = (norm.query, norm.key) if norm else (out, out)
        page_size, head_dim = pages.shape[4:]
        self._runner.run_job(
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
            self._set_plan(plan),
            plan.real_rows,
            0 if norm is None else 2 if norm.after_rope else 1,
            float_to_bits(norm.eps if norm else 0.0),
            pages.stride(2) * layer,
            pages.stride(1),
            page_size,
            shape.kv_heads,
            self._group,
            head_dim,
            rope.stride,
        )
        return out

    def paged_attention(
        self, query: Tensor, pages: Tensor, layer: int, plan: CpuPlan, shape: HeadShape, rules: AttentionRules
    ) -> Tensor:
        """Compute attention [R, Q * D] into scratch memory, by the kernel `attend_parts` on one thread or more. Padding
        rows are set to zero."""
        out = self._scratch.buffer("attended", plan.rows, shape.heads * shape.head_dim)
        if plan.rows > plan.real_rows:
            out[plan.real_rows :].zero_()
        page_size, head_dim = pages.shape[4:]
        self._runner.run_job(
            self._attend,
            *self._attention_parts(plan),
            _address(query),
            _address(pages),
            _address(out),
            self._set_plan(plan),
            self._attend_scratch.ctypes.data,
            self._attend_key_offsets.ctypes.data,
            pages.stride(2) * layer,
            pages.stride(0),
            pages.stride(1),
            page_size,
            shape.kv_heads,
            self._group,
            head_dim,
            self._max_item_rows,
            float_to_bits(shape.score_scale),
            float_to_bits(shape.softcap),
            rules.window,
            rules.chunk,
            0 if rules.slopes is None else _address(rules.slopes),
            0 if rules.sinks is None else _address(rules.sinks),
        )
        return out

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> None:
        """Multiply x [R, I] by sigmoid(gate) in place, by a compiled kernel; by torch if I is no multiple of 16."""
        rows, size = x.shape
        if size % LANES:
            self._torch_ops.sigmoid_gate(x, gate)
            return
        self._run_kernel(row_kernels.sigmoid_gate_rows, rows, 2 * rows * size, _address(x), _address(gate), size)

    def add_linear(self, x: Tensor, weight: Weight, residual: Tensor) -> Tensor:
        """Return `linear`, for the caller to add; `residual` stays as it is. The kernel of a following RMS norm can add
        it in the same pass."""
        return self.linear(x, weight)

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        return self.gated_activation(self.linear(x, weight), activation)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(first half) * second half of gate_up: [R, 2 * I] -> [R, I], in scratch memory. If I is no
        multiple of 16, torch computes it in new memory."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if size % LANES:
            return self._torch_ops.gated_activation(gate_up, activation)
        if activation != "silu":
            return self._activate(gate_up, size, activation, is_gated=True)
        out = self._scratch.buffer("gated", rows, size)
        cost_ns = 2 * rows * size
        self._runner.run_job(self._silu_and_mul, rows, cost_ns, _address(gate_up), _address(out), size)
        return out

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return the activation of x [R, I] in scratch memory, by a compiled kernel; by torch if I is no multiple of
        16."""
        if x.shape[1] % LANES:
            return self._torch_ops.activation(x, activation)
        return self._activate(x, x.shape[1], activation, is_gated=False)

    def lm_head(self, x: Tensor, weight: Weight, softcap: float) -> Tensor:
        """Return logits [R, V] of the tiled weight in fresh memory, soft-capped (softcap * tanh(logits / softcap)) if
        softcap is not 0."""
        tiled = _require_tiled(weight)
        logits = self._linear_into(x, tiled, torch.empty(x.shape[0], tiled.bias.size))
        return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Int32:
        return self._torch_ops.sample(logits, columns)

    def logprobs(self, logits: Tensor, token: Int32, wanted: Int32) -> LogprobColumns | None:
        return self._torch_ops.logprobs(logits, token, wanted)

    def _activate(self, source: Tensor, size: int, activation: Activation, *, is_gated: bool) -> Tensor:
        """Run the activation kernel on `source` and return the result [R, size] in scratch memory. `is_gated`: source
        is [R, 2 * size], and the activated first half is multiplied by the second."""
        rows = source.shape[0]
        out = self._scratch.buffer("gated", rows, size)
        kind = row_kernels.ACTIVATIONS.index(activation)
        arguments = _address(source), _address(out), size, kind, int(is_gated)
        self._run_kernel(row_kernels.activation_rows, rows, 2 * rows * size, *arguments)
        return out

    def _run_norm(self, x: Tensor, out: Tensor, norm: HeadNorm) -> None:
        """Write the norm of the parts of x's rows that `norm` names to the same places of `out`, which may be x."""
        rows, stride = x.shape
        self._run_kernel(
            row_kernels.norm_rows,
            rows,
            2 * rows * norm.groups * norm.size,
            _address(x) + norm.first * FLOAT_BYTES,
            _address(out) + norm.first * FLOAT_BYTES,
            stride,
            stride,
            norm.groups,
            norm.size,
            _address(norm.weight),
            0 if norm.bias is None else _address(norm.bias),
            0 if norm.weight.numel() == norm.size else norm.size,
            int(norm.centred),
            float_to_bits(norm.eps),
        )

    def _run_kernel(self, function: JobKernel, num_items: int, cost_ns: int, *arguments: int) -> None:
        """Run a job kernel that not every model needs on `num_items` items. Its first use compiles it and keeps its
        job. `cost_ns`: estimated time of one thread for all items."""
        name = function.__name__
        if name not in self._kernels:
            self._kernels[name] = Job(compile_job_kernel(function, name), len(arguments))
        self._runner.run_job(self._kernels[name], num_items, cost_ns, *arguments)

    def _set_plan(self, plan: CpuPlan) -> int:
        """Let the kernels use this plan. Return the address of the list of its arrays' addresses."""
        self._plan_addresses[:] = plan.addresses()
        return self._plan_addresses.ctypes.data

    def _attention_parts(self, plan: CpuPlan) -> tuple[int, int]:
        """Return the number of the plan's parts, and the cost of all in nanoseconds."""
        return plan.part_offsets.size - 1, plan.num_pairs * self._pair_cost_ns

    def _linear_into(self, x: Tensor, weight: TiledWeight, out: Tensor) -> Tensor:
        """Compute x @ weight.T + bias into `out` [R, outputs of all tiles], segment after segment. Return it without
        the padding outputs, as a copy if there are any. x is padded with zeros to whole blocks."""
        rows, padded_inputs = x.shape[0], weight.blocks * BLOCK_SIZE
        if padded_inputs != weight.inputs:
            x = functional.pad(x, (0, padded_inputs - weight.inputs))
        x = x.contiguous()
        padded_outputs = weight.bias.size
        for job in self._linear_jobs[id(weight)][1]:
            arguments = job.arguments
            arguments[_X_ARGUMENT], arguments[_ROWS_ARGUMENT], arguments[_OUT_ARGUMENT] = (
                x.data_ptr(),
                rows,
                out.data_ptr(),
            )
            self._runner.run_job(job, job.num_tiles, job.num_tiles * rows * padded_inputs)
        return out if padded_outputs == weight.outputs else out[:, : weight.outputs].contiguous()


class _LinearJob(Job):
    """The linear job of one segment. Only the arguments x, rows and out change between calls."""

    def __init__(self, weight: TiledWeight, segment: Tiles) -> None:
        super().__init__(
            compile_linear(segment.storage, segment.data.dtype, segment.scale.dtype),
            len(LINEAR_ARGUMENTS),
            MICROKERNEL_TILES,
        )
        bias = weight.bias[segment.first_output :]
        values = {name: each.ctypes.data for name, each in (("data", segment.data), ("scale", segment.scale))}
        values |= {"offset": segment.offset.ctypes.data, "bias": bias.ctypes.data, "blocks": weight.blocks}
        values |= {"out_stride": weight.bias.size, "first_output": segment.first_output}
        values |= {"macrokernel": compile_macrokernel()}
        self.arguments[:] = [values.get(name, 0) for name in LINEAR_ARGUMENTS]
        self.num_tiles = segment.num_tiles


def _require_tiled(weight: Weight) -> TiledWeight:
    """Return the weight. Raises TypeError unless it is a TiledWeight, which `CpuOps.prepare` makes."""
    if not isinstance(weight, TiledWeight):
        raise TypeError(f"not prepared: {type(weight).__name__}")
    return weight


def _address(tensor: Tensor) -> int:
    """Return the address of the first element. Raises ValueError for a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError("the kernels take contiguous tensors")
    return tensor.data_ptr()

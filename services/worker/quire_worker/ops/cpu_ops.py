"""`Ops` for the CPU with compiled kernels where torch would walk over memory several times; the rest is torch's.

The torch reference computes the same by plain means; tests compare the two. Exactness is the same: a row's results
depend on its own sequence alone, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from quire_common.credit import LogprobColumns
from quire_worker.arrays import Float32, Int32, Int64
from quire_worker.model.arch_spec import Activation
from quire_worker.ops import cpu_attention, cpu_rows, cpu_tile
from quire_worker.ops.cpu_linear import BLOCK, LINEAR_ARGUMENTS, compile_linear, make_embedding
from quire_worker.ops.cpu_plan import CpuPlan, item_tokens, plan_step
from quire_worker.ops.cpu_threads import CpuThreads
from quire_worker.ops.interface import HeadShape, QkNormWeights, RopeTables
from quire_worker.ops.scratch import Scratch
from quire_worker.ops.simd import LANES
from quire_worker.ops.tile_weight import tile_weight
from quire_worker.ops.torch_reference import TorchOps
from quire_worker.ops.weight import TiledWeight, Tiles, Weight
from quire_worker.sampling.columns import SamplingColumns

_NO_NORM_WEIGHT: Final = np.zeros(0, np.float32)
_MAX_CACHED_FLATS: Final = 4096
_X, _ROWS, _OUT = (LINEAR_ARGUMENTS.index(name) for name in ("x", "rows", "out"))
_PAIR_COST: Final = 8
"""Of a (query, key) pair with 64 numbers per head; see CpuThreads."""


class CpuOps:
    """Implements `Ops`. One object per model, used by a single thread; making it compiles the kernels."""

    def __init__(self, shape: HeadShape, page_size: int) -> None:
        self._torch = TorchOps(shape, page_size)
        self.row_multiple = 1
        self.batch_invariant = True
        self._flats: dict[int, tuple[Tensor, Float32]] = {}
        self._jobs: dict[int, tuple[TiledWeight, list[_LinearJob]]] = {}
        self._embeddings: dict[str, Callable[..., None]] = {}
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

    def prepare(self, weight: Weight, *, embeds: bool = False) -> TiledWeight:
        """Repack the weight into tiles and compile the kernels for its storage; `embeds`: the embedding kernel, too."""
        tiled = weight if isinstance(weight, TiledWeight) else tile_weight(weight)
        self._jobs[id(tiled)] = tiled, [_linear_job(tiled, segment) for segment in tiled.segments]
        if embeds:
            (segment,) = tiled.segments
            self._embeddings.setdefault(segment.storage, make_embedding(segment.storage))
            self._embed_tokens(np.zeros(1, np.int64), tiled)
        return tiled

    def plan(self, pages: Tensor, rows: int, position: Int32, count: Int32, page_table: Int32) -> CpuPlan:
        return plan_step(pages, rows, position, count, page_table, self._group)

    def embedding(self, token: Tensor, weight: Weight, scale: float) -> Tensor:
        rows = self._embed_tokens(token.numpy(), _tiled(weight))
        return rows if scale == 1.0 else rows.mul_(scale)

    def rms_norm(self, x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        if size % LANES:
            return self._torch.rms_norm(x, norm_weight, eps)
        out = self._scratch.take("normed", rows, size)
        given = self._flat(x), self._cached_flat(norm_weight), np.float32(eps), size, self._flat(out)
        self._threads.rows(cpu_rows.norm_rows, rows, size, *given)
        return out

    def add_rms_norm(self, delta: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        rows, size = residual.shape
        if size % LANES:
            return self._torch.add_rms_norm(delta, residual, norm_weight, eps)
        out = self._scratch.take("normed", rows, size)
        given = self._flat(delta), self._flat(residual), self._cached_flat(norm_weight)
        self._threads.rows(cpu_rows.add_norm_rows, rows, size, *given, np.float32(eps), size, self._flat(out))
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
        flat, cached = self._flat, self._cached_flat
        self._threads.rows(
            cpu_rows.rope_write_rows,
            plan.rows,
            qkv.shape[1],
            flat(qkv),
            cached(pages),
            plan.write_at,
            plan.position,
            cached(rope.cos),
            cached(rope.sin),
            norm is not None,
            _NO_NORM_WEIGHT if norm is None else cached(norm.query),
            _NO_NORM_WEIGHT if norm is None else cached(norm.key),
            np.float32(0.0 if norm is None else norm.eps),
            pages.stride(2) * layer,
            self._sizes(pages),
            flat(out),
        )
        return out

    def paged_attention(
        self, query: Tensor, pages: Tensor, layer: int, plan: CpuPlan, shape: HeadShape, window: int
    ) -> Tensor:
        out = self._scratch.take("attended", plan.rows, shape.heads * shape.head_dim)
        out[plan.real_rows :].zero_()
        given = (
            self._flat(query),
            self._cached_flat(pages),
            plan.table,
            plan.items,
            pages.stride(2) * layer,
            self._sizes(pages),
            np.float32(shape.score_scale),
            np.float32(shape.softcap),
            window,
        )
        target = self._flat(out)
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
        self._threads.rows(cpu_rows.silu_gate_rows, rows, 2 * size, self._flat(gate_up), size, self._flat(out))
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

    def _linear_into(self, x: Tensor, weight: TiledWeight, out: Tensor) -> Tensor:
        """Compute x @ weight.T + bias into `out` [R, outputs of all tiles]; return it without the padding outputs."""
        rows, size = x.shape[0], weight.blocks * BLOCK
        if size != weight.inputs:
            x = functional.pad(x, (0, size - weight.inputs))
        x = x.contiguous()
        padded = weight.bias.size
        for job in self._jobs[id(weight)][1]:
            arguments = job.arguments
            arguments[_X], arguments[_ROWS], arguments[_OUT] = x.data_ptr(), rows, out.data_ptr()
            self._threads.job(job.function, job.tiles, rows * size, job.address)
        return out if padded == weight.outputs else out[:, : weight.outputs].contiguous()

    def _embed_tokens(self, token: Int64, weight: TiledWeight) -> Tensor:
        (tiles,) = weight.segments
        out = torch.empty(token.size, weight.inputs)
        self._threads.rows(
            self._embeddings[tiles.storage],
            token.size,
            weight.inputs * LANES,
            *(token, tiles.data, tiles.scale, tiles.offset, weight.blocks, self._flat(out), weight.inputs),
        )
        return out

    def _flat(self, tensor: Tensor) -> Float32:
        """A contiguous tensor as the flat array that kernels take; `view` raises for one that is not contiguous."""
        kept = self._flats.get(id(tensor))
        if kept is not None and kept[0] is tensor:
            return kept[1]
        flat: Float32 = tensor.view(-1).numpy()
        return flat

    def _cached_flat(self, tensor: Tensor) -> Float32:
        """The same, cached for tensors that live across steps: making the array takes longer than some kernels."""
        flat = self._flat(tensor)
        if id(tensor) not in self._flats:
            if len(self._flats) >= _MAX_CACHED_FLATS:
                self._flats.clear()
            self._flats[id(tensor)] = tensor, flat
        return flat

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


@dataclass(frozen=True, slots=True)
class _LinearJob:
    """The linear kernel of one segment and its arguments, of which only x, rows and out change between calls."""

    function: int
    arguments: Int64
    address: int
    """Address of `arguments`."""
    tiles: int


def _linear_job(weight: TiledWeight, segment: Tiles) -> _LinearJob:
    bias = weight.bias[segment.first_output :]
    function = compile_linear(segment.storage, segment.data.dtype, segment.scale.dtype)
    addresses = {name: each.ctypes.data for name, each in (("data", segment.data), ("scale", segment.scale))}
    addresses |= {"offset": segment.offset.ctypes.data, "bias": bias.ctypes.data, "blocks": weight.blocks}
    addresses |= {"out_stride": weight.bias.size, "first_output": segment.first_output}
    arguments = np.array([addresses.get(name, 0) for name in LINEAR_ARGUMENTS], np.int64)
    return _LinearJob(function, arguments, arguments.ctypes.data, segment.num_tiles)


def _tiled(weight: Weight) -> TiledWeight:
    if not isinstance(weight, TiledWeight):
        raise TypeError(f"not prepared: {type(weight).__name__}")
    return weight

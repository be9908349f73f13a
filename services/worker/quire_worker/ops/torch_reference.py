"""The torch reference of `Ops`: float32, on the CPU, batch-invariant to the bit where the machine's GEMMs allow it.

Activations use operations that give an element the same bits wherever it lies in a tensor. torch's own silu and sigmoid
compute the ends of a buffer with another exp than its middle.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as functional
from torch import Tensor

from quire_common.credit import LogprobColumns
from quire_worker.arrays import Int32
from quire_worker.model.arch_spec import Activation
from quire_worker.ops.cpu.erf import ERF_COEFFICIENTS, ERF_SCALE
from quire_worker.ops.interface import AttentionRules, HeadNorm, HeadShape, QkNormWeights, RopeTables, RunLayers
from quire_worker.ops.invariance import ROW_TILES, attention_row_tile, gemm_depends_on_rows
from quire_worker.ops.scratch import Scratch
from quire_worker.ops.torch_attention import paged_attention
from quire_worker.ops.torch_plan import TorchPlan, plan_step
from quire_worker.ops.weight import DenseWeight, StoredWeight, Weight, as_dense
from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.logprobs import logprob_columns
from quire_worker.sampling.sampler import sample

ROW_MULTIPLE: Final = 16
_KEYS_PER_TILE: Final = 64
# Threads may divide the rows of one GEMM among themselves, so each thread needs enough rows.
_SPLIT_ROWS: Final = 16
_GELU_SCALE: Final = math.sqrt(2.0 / math.pi)


class TorchOps:
    """Implements `Ops`. A model has one object, and its scratch memory, which `paged_attention` uses, allows only one
    thread.

    The constructor measures from how many query rows on the bits of attention do not depend on other rows, and
    `prepare` measures each shape of GEMMs. Both hold for the number of torch threads that is set then. This number
    must not change afterwards.
    """

    row_multiple = ROW_MULTIPLE
    max_recorded_rows = 0

    def __init__(self, shape: HeadShape, page_size: int) -> None:
        self._heads_per_kv = shape.heads // shape.kv_heads
        self._tile = page_size * max(1, _KEYS_PER_TILE // page_size)
        row_tile = attention_row_tile(shape.head_dim, self._tile, shape.kv_heads)
        self.batch_invariant = row_tile is not None
        """False on a machine whose batched products depend on the number of rows in every variant that was tried."""
        self._row_tile = max(row_tile or ROW_TILES[-1], _SPLIT_ROWS if torch.get_num_threads() > 1 else 0)
        self._in_blocks: dict[tuple[int, int], bool] = {}
        self._scratch = Scratch()

    def prepare(self, weight: Weight, *, embeds: bool = False) -> Weight:
        """Return a StoredWeight as a dense one in float32, and any other weight unchanged. Measure now, once per shape,
        whether GEMMs of this shape depend on the number of rows. `embeds` changes nothing."""
        shape = weight.outputs, weight.inputs
        if shape not in self._in_blocks:
            self._in_blocks[shape] = gemm_depends_on_rows(*shape)
        return weight.dense() if isinstance(weight, StoredWeight) else weight

    def plan(self, pages: Tensor, rows: int, position: Int32, count: Int32, page_table: Int32) -> TorchPlan:
        """Return the plan of a step's attention, with the key tile and the row tile of this object; see `Ops.plan`."""
        return plan_step(
            pages,
            rows,
            position,
            count,
            page_table,
            heads_per_kv=self._heads_per_kv,
            tile=self._tile,
            row_tile=self._row_tile,
        )

    def positions(self, plan: TorchPlan) -> Tensor:
        return plan.position

    def capture(self, run: RunLayers[TorchPlan]) -> RunLayers[TorchPlan]:
        return run

    def embedding(self, token: Tensor, weight: Weight, scale: float) -> Tensor:
        """Return the tokens' rows of the weight times `scale`, [R, H]. Raises TypeError unless the weight is dense."""
        rows = as_dense(weight).data.index_select(0, token)
        return rows if scale == 1.0 else rows.mul_(scale)

    def rms_norm(self, x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        variance = x.square().mean(dim=-1, keepdim=True)
        return torch.mul(x, variance.add_(eps).rsqrt_()).mul_(norm_weight)

    def add_rms_norm(self, delta: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        residual.add_(delta)
        return self.rms_norm(residual, norm_weight, eps)

    def layer_norm(self, x: Tensor, norm_weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return (x - mean(x)) / sqrt(variance(x) + eps) * norm_weight, plus the bias if there is one, over the last
        axis."""
        centred = x - x.mean(dim=-1, keepdim=True)
        normed = self.rms_norm(centred, norm_weight, eps)
        return normed if bias is None else normed.add_(bias)

    def head_norm(self, x: Tensor, norm: HeadNorm) -> None:
        """Norm the groups of each row of x that `norm` names, in place: a layer norm if `centred`, else an RMS norm.
        Both add the bias if there is one."""
        parts = x[:, norm.first : norm.first + norm.groups * norm.size].view(len(x), norm.groups, norm.size)
        rows = parts - parts.mean(dim=-1, keepdim=True) if norm.centred else parts
        normed = self.rms_norm(rows, norm.weight.view(-1, norm.size), norm.eps)
        parts.copy_(normed if norm.bias is None else normed.add_(norm.bias.view(-1, norm.size)))

    def add(self, delta: Tensor, residual: Tensor) -> None:
        residual.add_(delta)

    def add_positions(self, x: Tensor, table: Tensor, plan: TorchPlan) -> None:
        x.add_(table.index_select(0, plan.position))

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        dense = as_dense(weight)
        return self._gemm(x, dense.data, dense.bias)

    def _gemm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias [R, outputs]. If the shape's results depend on the number of rows, x is computed
        in blocks of 16 rows. A new shape is measured first."""
        in_blocks = self._in_blocks.get((weight.shape[0], weight.shape[1]))
        if in_blocks is None:
            self.prepare(DenseWeight(weight))
            return self._gemm(x, weight, bias)
        if not in_blocks:
            return functional.linear(x, weight, bias)
        # The number of rows is the same each time, so results cannot depend on it.
        return torch.cat([functional.linear(rows, weight, bias) for rows in torch.split(x, ROW_MULTIPLE)])

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        pages: Tensor,
        layer: int,
        plan: TorchPlan,
        shape: HeadShape,
        rope: RopeTables,
        norm: QkNormWeights | None,
    ) -> Tensor:
        """Norm (if `norm` is given) and rotate query and key heads, before or after each other as `norm` says. Write
        keys and values of real rows to the layer's pages. Return the queries [R, Q * D], not scaled.

        A norm before the rotation mutates qkv.
        """
        heads, rotated_heads, half = shape.heads, shape.heads + shape.kv_heads, shape.head_dim // 2
        parts = qkv.view(plan.rows, rotated_heads + shape.kv_heads, shape.head_dim)
        if norm is not None and not norm.after_rope:
            self._norm_heads(parts, heads, norm)
        cos, sin = plan.rotate_by(rope)
        first, second = parts[:, :rotated_heads, :half], parts[:, :rotated_heads, half:]
        rotated = torch.empty(plan.rows, rotated_heads, shape.head_dim)
        torch.mul(first, cos, out=rotated[:, :, :half]).sub_(second * sin)
        torch.mul(second, cos, out=rotated[:, :, half:]).add_(first * sin)
        if norm is not None and norm.after_rope:
            self._norm_heads(rotated, heads, norm)
        vectors = pages.view(-1, shape.head_dim)
        begin = 2 * layer * plan.page_size
        for kind, source in ((0, rotated[:, heads:]), (1, parts[:, rotated_heads:])):
            vectors[begin + kind * plan.page_size :][plan.write_index] = source[: plan.real_rows]
        return rotated[:, :heads].reshape(plan.rows, heads * shape.head_dim)

    def _norm_heads(self, parts: Tensor, heads: int, norm: QkNormWeights) -> None:
        """Apply the RMS norms to the `heads` query heads and the key heads of `parts` [R, heads, D], in place. With a
        norm before the rotation, value heads follow the key heads and stay unchanged."""
        keys = slice(heads, heads + (parts.shape[1] - heads if norm.after_rope else (parts.shape[1] - heads) // 2))
        parts[:, :heads] = self.rms_norm(parts[:, :heads], norm.query, norm.eps)
        parts[:, keys] = self.rms_norm(parts[:, keys], norm.key, norm.eps)

    def paged_attention(
        self, query: Tensor, pages: Tensor, layer: int, plan: TorchPlan, shape: HeadShape, rules: AttentionRules
    ) -> Tensor:
        return paged_attention(query, pages, layer, plan, shape, rules, self._scratch)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> None:
        x.div_(gate.neg().exp_().add_(1.0))

    def add_linear(self, x: Tensor, weight: Weight, residual: Tensor) -> Tensor:
        """The norm that follows adds the result."""
        return self.linear(x, weight)

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        return self.gated_activation(self.linear(x, weight), activation)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[R, 2 * I] -> [R, I] = activation(first half) * second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate, activation).mul_(up)

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return the named activation of x: silu, relu, relu_squared (relu, then squared), gelu (with erf), or else
        gelu's tanh approximation."""
        if activation == "silu":
            return torch.div(x, x.neg().exp_().add_(1.0))
        if activation == "relu":
            return x.clamp(min=0.0)
        if activation == "relu_squared":
            return x.clamp(min=0.0).square_()
        if activation == "gelu":
            return _gelu(x)
        inner = x.square().mul_(x).mul_(0.044715).add_(x).mul_(_GELU_SCALE)
        return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)

    def lm_head(self, x: Tensor, weight: Weight, softcap: float) -> Tensor:
        logits = self.linear(x, weight)
        return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Int32:
        return sample(logits, columns)

    def logprobs(self, logits: Tensor, token: Int32, wanted: Int32) -> LogprobColumns | None:
        return logprob_columns(logits, token, wanted)


def _gelu(x: Tensor) -> Tensor:
    """Return 0.5 x (1 + erf(x / sqrt(2))), with erf by Abramowitz and Stegun, formula 7.1.26."""
    size = x.abs().mul_(math.sqrt(0.5))
    inverse = (size * ERF_SCALE).add_(1.0).reciprocal_()
    polynomial = torch.full_like(x, ERF_COEFFICIENTS[0])
    for term in ERF_COEFFICIENTS[1:]:
        polynomial.mul_(inverse).add_(term)
    erf = polynomial.mul_(inverse).mul_(size.square().neg_().exp_()).neg_().add_(1.0)
    return erf.mul_(x.abs()).add_(x).mul_(0.5)

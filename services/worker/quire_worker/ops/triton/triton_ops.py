"""TritonOps implements `Ops` on a CUDA device, or under Triton's interpreter on the CPU.

Linear layers go to cuBLAS unless a kernel config was measured to be faster for the shape (gemm.py). Every call but
`plan`, `sample` and `logprobs` is asynchronous and can be captured into a CUDA graph, if the plan has no fresh prompts.
With `pdl`, kernels start while those before them end. cuBLAS does not support this, so a linear layer by cuBLAS waits
for all kernels before it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from quire_common.credit import LogprobColumns
from quire_worker.arrays import Int32
from quire_worker.model.arch_spec import Activation
from quire_worker.ops.interface import AttentionRules, HeadNorm, HeadShape, QkNormWeights, RopeTables, RunLayers
from quire_worker.ops.triton.attention import decode_attention, prefill_attention
from quire_worker.ops.triton.attention_plan import TritonPlan, plan_step
from quire_worker.ops.triton.fresh_attention import Fresh, fresh_attention
from quire_worker.ops.triton.gemm import GemmConfigs, gemm_add
from quire_worker.ops.triton.kernels.activation import activation_kernel
from quire_worker.ops.triton.kernels.embedding import embedding_kernel
from quire_worker.ops.triton.kernels.norm import rms_norm_kernel
from quire_worker.ops.triton.kernels.rope import qk_norm_rope_write_kernel
from quire_worker.ops.triton.launch import empty_like_rows, options, power_of_two
from quire_worker.ops.triton.sigmoid_gate import sigmoid_gate
from quire_worker.ops.weight import Weight, as_dense
from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.logprobs import logprob_columns
from quire_worker.sampling.sampler import sample

_ELEMENTS = 1024
# From this number of rows on, a program of rope takes several rows, and linear layers are added to the residual at
# once.
_MANY_ROWS = 1024
_TOGETHER = 4
# torch computes the other activations.
_KERNEL_ACTIVATIONS = ("silu", "gelu_tanh")


class TritonOps:
    """Implements `Ops`. A model has one object per device, and all calls come from one thread."""

    row_multiple = 1
    max_recorded_rows = 0

    def __init__(
        self,
        shape: HeadShape,
        device: torch.device,
        gemm_configs: GemmConfigs,
        *,
        pdl: bool = False,
        kept_logits: Tensor | None = None,
    ) -> None:
        self._shape = shape
        self._group = shape.heads // shape.kv_heads
        self._device = device
        self.gemm_configs = gemm_configs
        self.batch_invariant = gemm_configs.batch_invariant
        """Whether the bits of a row depend on this row alone. Then work is divided in the same way for any number of
        rows."""
        self.kept_logits = kept_logits
        """Memory [most rows, V] for logits: a step with as many or fewer rows overwrites its first rows. Without it,
        every captured graph would have its own memory for logits."""
        self.pdl = pdl
        """Whether kernels overlap with the kernels before them, from the next call on."""

    def prepare(self, weight: Weight, *, embeds: bool = False) -> Weight:
        """Return the weight unchanged. Nothing is measured at start, because a table has the kernel configs."""
        return weight

    def plan(self, pages: Tensor, rows: int, position: Int32, count: Int32, page_table: Int32) -> TritonPlan:
        return plan_step(self._device, rows, position, count, page_table, self._shape, even=self.batch_invariant)

    def positions(self, plan: TritonPlan) -> Tensor:
        return plan.position.clamp(min=0).long()

    def capture(self, run: RunLayers[TritonPlan]) -> RunLayers[TritonPlan]:
        return run

    def embedding(self, token: Tensor, weight: Weight, scale: float) -> Tensor:
        """Return the tokens' rows of the weight times `scale`, [R, H] in the weight's type. Raises TypeError unless the
        weight is dense."""
        rows = as_dense(weight).data
        hidden = rows.shape[1]
        out = torch.empty((token.shape[0], hidden), dtype=rows.dtype, device=rows.device)
        grid = (token.shape[0], -(-hidden // _ELEMENTS))
        embedding_kernel[grid](token, rows, out, hidden, scale, BLOCK=_ELEMENTS, **options(self.pdl))
        return out

    def rms_norm(self, x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        return self._norm(None, x, norm_weight, eps)

    def add_rms_norm(self, delta: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        return self._norm(delta, residual, norm_weight, eps)

    def layer_norm(self, x: Tensor, norm_weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See `Ops.layer_norm`. It runs torch's own kernel."""
        return functional.layer_norm(x, (x.shape[1],), norm_weight, bias, eps)

    def head_norm(self, x: Tensor, norm: HeadNorm) -> None:
        """Norm the groups of each row of x that `norm` names, in place, by torch in float32: a layer norm if `centred`,
        else an RMS norm. Both add the bias if there is one."""
        parts = x[:, norm.first : norm.first + norm.groups * norm.size].view(len(x), norm.groups, norm.size)
        exact = parts.float()
        if norm.centred:
            exact -= exact.mean(dim=-1, keepdim=True)
        exact *= torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + norm.eps) * norm.weight.view(-1, norm.size)
        parts.copy_(exact if norm.bias is None else exact + norm.bias.view(-1, norm.size))

    def add(self, delta: Tensor, residual: Tensor) -> None:
        residual.add_(delta)

    def add_positions(self, x: Tensor, table: Tensor, plan: TritonPlan) -> None:
        """See `Ops.add_positions`. Padding rows get the embedding of the first position."""
        x.add_(table.index_select(0, self.positions(plan)))

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return self.gemm_configs.gemm(x, weight, self.pdl)

    def add_linear(self, x: Tensor, weight: Weight, residual: Tensor) -> Tensor | None:
        """Return the linear layer's result for the next norm to add, if x has fewer than 1024 rows or with
        `batch_invariant`. Otherwise cuBLAS adds it to `residual` in place, a second operation adds the bias if there is
        one, and None is returned."""
        if x.shape[0] < _MANY_ROWS or self.batch_invariant:
            return self.linear(x, weight)
        gemm_add(residual, x, weight)
        return None

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        pages: Tensor,
        layer: int,
        plan: TritonPlan,
        shape: HeadShape,
        rope: RopeTables,
        norm: QkNormWeights | None,
    ) -> Tensor:
        """Norm and rotate queries and keys, and write keys and values to the layer's pages, by one kernel. Returns the
        queries [R, Q * D] in a new tensor; see `Ops.qk_norm_rope_write`. If the plan looked for fresh prompts, the
        kernel also writes the rotated keys back to qkv, and zeros for keys and values of padding rows, and the plan
        keeps qkv."""
        query = empty_like_rows(qkv, shape.heads * shape.head_dim)
        norm_weights = (rope.cos, rope.cos) if norm is None else (norm.query, norm.key)
        rows = qkv.shape[0]
        together = 1 if rows < _MANY_ROWS or self.batch_invariant else _TOGETHER
        qk_norm_rope_write_kernel[(-(-rows // together), shape.kv_heads)](
            qkv,
            *norm_weights,
            rope.cos,
            rope.sin,
            plan.position,
            plan.sequence,
            plan.page_table,
            pages,
            query,
            rows,
            0.0 if norm is None else norm.eps,
            *plan.addressing(pages, layer),
            HEADS=shape.heads,
            KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            TABLE=rope.stride,
            PAGE=pages.shape[4],
            NORM=0 if norm is None else 2 if norm.after_rope else 1,
            LANES=power_of_two(shape.head_dim // 2),
            PARTS=power_of_two(self._group + 2),
            TOGETHER=together,
            KEPT=plan.fresh is not None,
            **options(self.pdl, num_warps=2 if together == 1 else 1),
        )
        plan.keep_turned(qkv)
        return query

    def paged_attention(
        self,
        query: Tensor,
        pages: Tensor,
        layer: int,
        plan: TritonPlan,
        shape: HeadShape,
        rules: AttentionRules,
    ) -> Tensor:
        """Compute attention [R, Q * D]: decode rows by splits of their keys, prefill rows by tiles, and fresh prompts
        by torch. Padding rows hold arbitrary values, which nothing reads. Raises ValueError for a fresh prompt in a
        layer with attention rules."""
        out = torch.empty_like(query)
        decode_attention(query, pages, layer, plan, shape, rules, out, self.pdl)
        prefill_attention(query, pages, layer, plan, shape, rules, out, self.pdl)
        if plan.fresh and plan.turned is not None:
            if not rules.is_plain:
                raise ValueError("torch's attention knows no rules: plan without fresh prompts")
            fresh_attention(query, plan.turned, plan.fresh, shape, lambda chunk, rows: _put(out, chunk, rows))
        return out

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> None:
        sigmoid_gate(x, gate, self.pdl)

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        """Compute activation(first half) * second half of the linear layer's outputs, [R, I]: by one kernel for silu or
        gelu_tanh, if a table has a config, the weight has no bias and `batch_invariant` is off; else by a GEMM and an
        activation."""
        whole = None
        if activation in _KERNEL_ACTIVATIONS:
            whole = self.gemm_configs.gated_gemm(x, weight, self.pdl, gelu=activation == "gelu_tanh")
        return self.gated_activation(self.linear(x, weight), activation) if whole is None else whole

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Compute activation(first half) * second half: [R, 2 * I] -> [R, I], silu and gelu_tanh by one kernel, others
        by torch. Used where one kernel does not compute the linear layer too."""
        if activation not in _KERNEL_ACTIVATIONS:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.activation(gate, activation).mul_(up)
        return self._activate(gate_up, gate_up.shape[1] // 2, activation, gated=True)

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return the activation of x [R, I]: silu and gelu_tanh by a kernel, gelu, relu and relu_squared by torch."""
        if activation == "gelu":
            return functional.gelu(x)
        if activation in ("relu", "relu_squared"):
            positive = functional.relu(x)
            return positive.square_() if activation == "relu_squared" else positive
        return self._activate(x, x.shape[1], activation, gated=False)

    def lm_head(self, x: Tensor, weight: Weight, softcap: float) -> Tensor:
        """Compute logits [R, V] in the type of x, soft-capped if softcap is not 0. They lie in `kept_logits`, which the
        next call overwrites, if its rows suffice; else in fresh memory."""
        kept = self.kept_logits
        out = kept[: len(x)] if kept is not None and len(x) <= len(kept) else None
        logits = self.gemm_configs.gemm(x, weight, self.pdl, out)
        return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Int32:
        """Run the reference on the host."""
        return sample(logits.float().cpu(), columns)

    def logprobs(self, logits: Tensor, token: Int32, wanted: Int32) -> LogprobColumns | None:
        """Run the reference on the host."""
        return logprob_columns(logits.float().cpu(), token, wanted)

    def _norm(self, delta: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of residual [R, H] times norm_weight. If there is a delta, add it to residual in place
        first."""
        rows, hidden = residual.shape
        out = torch.empty_like(residual)
        block = power_of_two(hidden)
        rms_norm_kernel[(rows,)](
            residual if delta is None else delta,
            residual,
            norm_weight,
            out,
            hidden,
            eps,
            ADD=delta is not None,
            BLOCK=block,
            **options(self.pdl, num_warps=max(1, min(8, block // 512))),
        )
        return out

    def _activate(self, source: Tensor, inner: int, activation: Activation, *, gated: bool) -> Tensor:
        """Return the silu or gelu_tanh activation of `source` as [R, inner], by a kernel. `gated`: source is [R, 2 *
        inner], and the activated first half is multiplied by the second."""
        out = empty_like_rows(source, inner)
        grid = (source.shape[0], -(-inner // _ELEMENTS))
        activation_kernel[grid](
            source, out, inner, GATED=gated, GELU=activation == "gelu_tanh", BLOCK=_ELEMENTS, **options(self.pdl)
        )
        return out


def _put(out: Tensor, chunk: Fresh, rows: Tensor) -> None:
    out[chunk.row : chunk.row + chunk.tokens].copy_(rows)

"""TransformersDecoder: computes the rows of a step with a model of the Transformers backend.

The model gets all rows of a step as one sequence of tokens, [1, R]. Each row has its position in its own sequence. Only
attention mixes rows, and Quire computes it, over KV pages. `check_rows` has tested that no other layer mixes rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic

import torch
from torch import Tensor

from quire_worker.model.arch_spec import TransformersSpec
from quire_worker.model.mixers import Attend
from quire_worker.model.rope import rope_tables
from quire_worker.ops.interface import AttentionRules, HeadShape, Ops, P, RopeTables
from quire_worker.transformers_backend.attention import AttentionCall, use_attention
from quire_worker.transformers_backend.split_model import SplitModel


class TransformersDecoder(Generic[P]):
    """Implements `StepDecoder`. The model applies RoPE itself, so that pages hold its rotated keys."""

    def __init__(
        self, spec: TransformersSpec, model: SplitModel, ops: Ops[P], device: torch.device, *, can_be_captured: bool
    ) -> None:
        self.spec = spec
        self.can_be_captured = can_be_captured
        """See `StepDecoder`: what `graph_defect` found."""
        self.ops = ops
        self.head_shape = HeadShape.of(spec)
        self._model = model
        self._rules = [AttentionRules(each.window, each.chunk) for each in spec.attention]
        # The model applies RoPE: these tables rotate nothing.
        self._rope = RopeTables(*(each.to(device) for each in rope_tables(None, spec.head_dim, spec.max_positions)))

    @property
    def batch_invariant(self) -> bool:
        """See `StepDecoder`: modelling code of transformers does not promise it."""
        return False

    @property
    def can_be_cut(self) -> bool:
        """See `StepDecoder`: never, since modelling code computes the linear layer behind attention."""
        return False

    @property
    def ops_compute_layers(self) -> bool:
        """See `StepDecoder`: torch computes all but attention, and its bits depend on the number of threads."""
        return False

    def few_layers(self) -> TransformersDecoder[P]:
        """Return the decoder itself: only the model can build a decoder with fewer layers."""
        return self

    def forward(
        self, token: Tensor, pages: Tensor, plan: P, attend: Attend[P] | None = None, output_rows: Tensor | None = None
    ) -> Tensor:
        """Run the model's layers on all rows of a step as one sequence, with attention over the pages: token [R] int64,
        clamped to the vocabulary -> hidden [R, H], or [N, H] of `output_rows`. Raises TypeError for `attend`: the model
        computes the linear layer that it would replace."""
        if attend is not None:
            raise TypeError("the Transformers backend cannot cut layers at attention")
        # While a GPU's kernels are compiled without running, the rows have no tokens, and torch's lookup must find one.
        token = token.clamp(0, self.spec.vocab_size - 1)
        with use_attention(_PagedRows(self, pages, plan, self._rules, self._rope)):
            hidden = self._model.hidden(token, self.ops.positions(plan))
        return hidden if output_rows is None else hidden.index_select(0, output_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `StepDecoder.logits`."""
        return self._model.logits(hidden)


class _PagedRows(Generic[P]):
    """The attention of one step, over the KV pages of its sequences."""

    def __init__(
        self, decoder: TransformersDecoder[P], pages: Tensor, plan: P, rules: list[AttentionRules], rope: RopeTables
    ) -> None:
        self._ops, self._shape, self._rope = decoder.ops, decoder.head_shape, rope
        self._pages, self._plan, self._rules = pages, plan, rules

    def attend(self, call: AttentionCall) -> Tensor:
        """Write the rows' keys and values to the pages of the layer, and attend to the pages of each row's sequence.
        Returns [1, R, Q, D]."""
        shape, rules = self._shape, self._rules[call.layer]
        rows = call.query.shape[2]
        query = call.query if call.scale == shape.score_scale else call.query * (call.scale / shape.score_scale)
        parts = (each.transpose(1, 2).reshape(rows, -1) for each in (query, call.key, call.value))
        qkv = torch.cat([each.to(call.value.dtype) for each in parts], dim=1)
        if call.sinks is not None:
            rules = replace(rules, sinks=call.sinks.float().contiguous())
        heads = self._ops.qk_norm_rope_write(qkv, self._pages, call.layer, self._plan, shape, self._rope, None)
        attended = self._ops.paged_attention(heads, self._pages, call.layer, self._plan, shape, rules)
        return attended.view(1, rows, shape.heads, shape.head_dim).to(call.query.dtype)

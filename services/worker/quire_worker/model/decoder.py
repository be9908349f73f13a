"""Decoder: runs any `ArchSpec` by calling `Ops`. It knows nothing of devices, kernels, files or families."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.feed_forwards import DenseFeedForward
from quire_worker.model.mixers import Attend, AttentionMixer, RopeCache
from quire_worker.model.norms import Norm
from quire_worker.model.parameters import MODEL_WIDE, POSITIONS
from quire_worker.ops.interface import HeadShape, Ops, P
from quire_worker.ops.weight import Weight
from quire_worker.weights.parameter_store import ParameterStore


@dataclass(frozen=True, slots=True)
class Layer(Generic[P]):
    """The tensors of one layer; None where the spec has no such norm."""

    attention_norm: Norm | None
    mixer: AttentionMixer[P]
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    feed_forward: DenseFeedForward[P]
    mlp_post_norm: Norm | None
    is_parallel: bool = False


class Decoder(Generic[P]):
    """Computes hidden rows and logits from token rows. Keys and values go to the pages that the plan names."""

    def __init__(self, spec: ArchSpec, store: ParameterStore, ops: Ops[P], max_positions: int) -> None:
        self.spec = spec
        self.ops = ops
        self.head_shape = HeadShape.of(spec)
        self.embedding = ops.prepare(store.take_weight("embed", MODEL_WIDE), embeds=True)
        self.positions = (
            None if spec.positions is None else store.require(POSITIONS, MODEL_WIDE)[spec.positions.offset :]
        )
        self.embedding_norm = Norm.load(spec, store, "embedding_norm", MODEL_WIDE) if spec.embedding_norm else None
        # Scaling what enters the head scales its logits.
        self.final_norm = Norm.load(spec, store, "final_norm", MODEL_WIDE).scaled(spec.logit_scale)
        self.head = self.embedding if spec.tied_embeddings else _weight(ops, store, "head", MODEL_WIDE)
        ropes = RopeCache(spec, max_positions, self.final_norm.weight.device)
        self.layers = [_load_layer(spec, store, ops, layer, ropes) for layer in range(len(spec.layers))]
        self._run_layers = ops.capture(self.run_layers)

    @property
    def batch_invariant(self) -> bool:
        """See `StepDecoder`. The decoder is as batch-invariant as its ops."""
        return self.ops.batch_invariant

    @property
    def can_be_cut(self) -> bool:
        """See `StepDecoder`. A pass may always be cut."""
        return True

    @property
    def can_be_captured(self) -> bool:
        """See `StepDecoder`: always."""
        return True

    @property
    def ops_compute_layers(self) -> bool:
        """See `StepDecoder`."""
        return True

    def few_layers(self) -> Decoder[P]:
        """Return a decoder of the first layers, with the same weights. It has as many layers as are needed for one of
        each attention window and chunk, with and without an output gate, and two at least if the model has them."""
        kinds = [
            (each.rules.window, each.rules.chunk, each.output_gate is None)
            for each in (layer.mixer for layer in self.layers)
        ]
        few = copy.copy(self)
        few.layers = self.layers[: max(2, *(kinds.index(each) + 1 for each in kinds))]
        few._run_layers = few.ops.capture(few.run_layers)
        return few

    def forward(
        self, token: Tensor, pages: Tensor, plan: P, attend: Attend[P] | None = None, output_rows: Tensor | None = None
    ) -> Tensor:
        """Compute hidden [R, H] before the final norm from token [R] int64, and write the rows' keys and values to
        `pages`.

        `attend`, if given, replaces attention and the linear layer after it in every layer. `output_rows` [N] int64, if
        given, names the rows whose hidden [N, H] is returned: the last feed-forward block computes only these. If
        neither is given, the ops may replay a recorded pass. The next pass may overwrite the result.
        """
        if attend is None and output_rows is None:
            residual, delta = self._run_layers(token, pages, plan)
        else:
            residual, delta = self.run_layers(token, pages, plan, attend, output_rows)
        return residual if delta is None else residual.add_(delta)

    def run_layers(
        self, token: Tensor, pages: Tensor, plan: P, attend: Attend[P] | None = None, output_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the embedding and all layers: `forward` without its last addition. Returns the residual [R, H], or
        [N, H] with `output_rows`, and what to add to it, which is None if nothing is left to add."""
        residual = self._embed(token, plan)
        delta: Tensor | None = None
        for layer in self.layers:
            rows = output_rows if layer is self.layers[-1] else None
            x = _enter(self.ops, delta, residual, layer.attention_norm)
            if layer.is_parallel:
                residual, delta = self._run_parallel(layer, x, residual, pages, plan, attend, rows)
                continue
            onto = residual if layer.attention_post_norm is None else None
            delta = _leave(self.ops, layer.mixer.run(self.ops, x, pages, plan, onto, attend), layer.attention_post_norm)
            if rows is not None:  # a row affects others only through attention, and there is none after this
                residual = residual.index_select(0, rows)
                delta = None if delta is None else delta.index_select(0, rows)
            x = _enter(self.ops, delta, residual, layer.mlp_norm)
            onto = residual if layer.mlp_post_norm is None else None
            delta = _leave(self.ops, layer.feed_forward.run(self.ops, x, onto), layer.mlp_post_norm)
        return residual, delta

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [N, V] from hidden [N, H]; N must be a multiple of the ops' row multiple."""
        return self.ops.lm_head(self.final_norm.run(self.ops, hidden), self.head, self.spec.logit_softcap)

    def _embed(self, token: Tensor, plan: P) -> Tensor:
        """Compute the residual stream before the first layer [R, H] from token [R]: scaled embeddings, plus learned
        position embeddings and a norm if the model has them."""
        residual = self.ops.embedding(token, self.embedding, self.spec.embedding_scale)
        if self.positions is not None:
            self.ops.add_positions(residual, self.positions, plan)
        return residual if self.embedding_norm is None else residual.copy_(self.embedding_norm.run(self.ops, residual))

    def _run_parallel(
        self,
        layer: Layer[P],
        x: Tensor,
        residual: Tensor,
        pages: Tensor,
        plan: P,
        attend: Attend[P] | None,
        output_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a layer whose feed-forward block takes the layer's input, as its mixer does, and not the mixer's result.
        With a norm of its own, the block takes the norm of that input, else the mixer's input `x`. The mixer's result
        is added to `residual`. Returns the residual, only its `output_rows` if they are given, and the block's
        result, which is None if it was added too.

        A result of an operation is valid until the same operation is called again. So the block's norm is computed
        after the mixer's first linear layer has read x.
        """
        inputs = layer.mixer.write(self.ops, x, pages, plan)
        if layer.mlp_norm is not None:
            x = layer.mlp_norm.run(self.ops, residual)
        mixed = layer.mixer.attend(self.ops, inputs, pages, plan, residual, attend)
        if mixed is not None:
            self.ops.add(mixed, residual)
        if output_rows is not None:
            x, residual = x.index_select(0, output_rows), residual.index_select(0, output_rows)
        return residual, layer.feed_forward.run(self.ops, x, residual)


def _enter(ops: Ops[P], delta: Tensor | None, residual: Tensor, norm: Norm | None) -> Tensor:
    """Add `delta`, the result of the block before, to the residual in place. `delta` is None before the first block, or
    if the block before has already added its result to the residual. Return the input of the next block: the norm of
    the residual, or the residual itself without a norm."""
    if norm is not None:
        return norm.add_and_run(ops, delta, residual)
    if delta is not None:
        ops.add(delta, residual)
    return residual


def _leave(ops: Ops[P], x: Tensor | None, norm: Norm | None) -> Tensor | None:
    return x if x is None or norm is None else norm.run(ops, x)


def _load_layer(spec: ArchSpec, store: ParameterStore, ops: Ops[P], index: int, ropes: RopeCache) -> Layer[P]:
    """Load layer `index` from the store: its mixer, its feed-forward block and the norms that the spec gives it. Norms
    that it lacks are None."""
    layer = spec.layers[index]
    wanted = {
        "attention_norm": layer.pre_norm,
        "attention_post_norm": layer.post_norm,
        "mlp_norm": layer.pre_norm and not layer.shared_norm,
        "mlp_post_norm": layer.post_norm,
    }
    norms = {role: Norm.load(spec, store, role, index) if has else None for role, has in wanted.items()}
    return Layer(
        mixer=AttentionMixer.load(spec, layer.mixer, store, ops, index, ropes),
        feed_forward=DenseFeedForward.load(layer.feed_forward, store, ops, index),
        is_parallel=layer.parallel,
        **norms,
    )


def _weight(ops: Ops[P], store: ParameterStore, role: str, layer: int) -> Weight:
    return ops.prepare(store.take_weight(role, layer))

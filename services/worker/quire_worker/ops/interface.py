"""The interface between the decoder and its implementations, for example the torch reference and the Triton kernels.

The docstrings of `Ops` are the contract. Shapes are in brackets: R rows (tokens) of a step, padding included, H hidden
size, Q query heads, K KV heads, D head size, V vocabulary. Floating-point tensors have the implementation's compute
type. All calls come from one thread. An operation mutates only what its docstring names. A result may be scratch memory
of the implementation, which is valid until the same operation is called again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from quire_common.credit import LogprobColumns
from quire_worker.arrays import Int32
from quire_worker.model.arch_spec import Activation, AttentionLayers
from quire_worker.ops.weight import Weight
from quire_worker.sampling.columns import SamplingColumns

P = TypeVar("P")
"""An implementation's own type of plan for the attention of a step."""
RunLayers = Callable[[Tensor, Tensor, P], tuple[Tensor, Tensor | None]]
"""The pass of a decoder over its layers: token [R] int64, pages and plan -> two results whose sum is hidden [R, H]; see
Decoder."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes and scales of attention heads, the same in all layers."""

    heads: int
    kv_heads: int
    head_dim: int
    score_scale: float
    softcap: float = 0.0
    """0: none."""

    @classmethod
    def of(cls, spec: AttentionLayers) -> HeadShape:
        """Return the head shape of the model's first layer, which all layers share."""
        first = spec.attention[0]
        return cls(first.heads, first.kv_heads, first.head_dim, first.score_scale, first.softcap)


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """The features of one layer's attention, beyond a softmax over scaled scores."""

    window: int = 0
    """A row at position p sees positions max(0, p - window + 1)..p; 0: all up to p."""
    chunk: int = 0
    """A row at position p sees positions p // chunk * chunk..p; 0: all up to p. Not with a window."""
    slopes: Tensor | None = None
    """[Q] float32: a key at position k adds slope * (k - p) to a score (ALiBi)."""
    sinks: Tensor | None = None
    """[Q] float32: a score of each head that counts in the softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        """Whether there are no such rules: every row sees all positions up to its own, with unchanged scores."""
        return not self.window and not self.chunk and self.slopes is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Cosines and sines by absolute position, each [positions, D / 2]; [1, D / 2] where all positions have the same."""

    cos: Tensor
    sin: Tensor

    @property
    def stride(self) -> int:
        """Elements from one position to the next; 0 if all positions share the tables' only row."""
        return self.cos.shape[1] if self.cos.shape[0] > 1 else 0


@dataclass(frozen=True, slots=True)
class QkNormWeights:
    """Weights of the RMS norms over query and key heads, each [D], and their epsilon."""

    query: Tensor
    key: Tensor
    eps: float
    after_rope: bool = False
    """The norm comes after the rotation."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A norm over parts of rows: `groups` parts of `size` numbers each, from number `first` of a row on."""

    first: int
    groups: int
    size: int
    eps: float
    centred: bool
    """A layer norm: the mean is subtracted first."""
    weight: Tensor
    """[size] if all groups have the same weights, or [groups * size]."""
    bias: Tensor | None
    """Like `weight`."""


class Ops(Protocol[P]):
    """The operations that a decoder consists of. Results never depend on padding rows. With `batch_invariant`, they do
    not depend on other rows either."""

    @property
    def row_multiple(self) -> int:
        """Steps must be padded to a multiple of this many rows."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """Whether the results of a row have the same bits whatever else is in the step."""
        ...

    def prepare(self, weight: Weight, *, embeds: bool = False) -> Weight:
        """Prepare a weight; the model calls this for each of its weights before any step. The implementation may
        measure, compile or choose kernels for the weight's GEMMs. Returns the weight for the other methods, which may
        be stored in another way. `embeds`: `embedding` takes this weight too."""
        ...

    def plan(self, pages: Tensor, rows: int, position: Int32, count: Int32, page_table: Int32) -> P:
        """Prepare a step's attention, once for all layers.

        `pages` is the pool [pages, K, layers, 2 (key, value), page_size, D]. position, count [S] and page_table [S, P]
        are as in StepBatch. Rows beyond sum(count) are padding: they attend to nothing, and their keys are written
        nowhere, or to page 0.
        """
        ...

    def positions(self, plan: P) -> Tensor:
        """[R] int64: the position of each row in its sequence; 0 for padding."""
        ...

    @property
    def max_recorded_rows(self) -> int:
        """Passes of up to this many rows may be recorded and replayed by what `capture` returns; 0: none is."""
        ...

    def capture(self, run: RunLayers[P]) -> RunLayers[P]:
        """Return a function that computes the same as `run`. It may record the work of `run` and replay it."""
        ...

    def embedding(self, token: Tensor, weight: Weight, scale: float) -> Tensor:
        """token [R] int64, weight of V outputs and H inputs -> [R, H]: rows of the weight, times `scale`."""
        ...

    def rms_norm(self, x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """[R, H] -> x / sqrt(mean(x^2) + eps) * norm_weight."""
        ...

    def add_rms_norm(self, delta: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """Mutates residual [R, H] += delta, then returns its rms_norm."""
        ...

    def layer_norm(self, x: Tensor, norm_weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """[R, H] -> (x - mean(x)) / sqrt(variance(x) + eps) * norm_weight + bias."""
        ...

    def head_norm(self, x: Tensor, norm: HeadNorm) -> None:
        """Mutates parts of the rows of x."""
        ...

    def add(self, delta: Tensor, residual: Tensor) -> None:
        """Mutates residual [R, H] += delta."""
        ...

    def add_positions(self, x: Tensor, table: Tensor, plan: P) -> None:
        """Mutates x [R, H] += the row of table [positions, H] for each row's position."""
        ...

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """[R, inputs] -> [R, outputs] = x @ weight.T + bias."""
        ...

    def add_linear(self, x: Tensor, weight: Weight, residual: Tensor) -> Tensor | None:
        """Compute `linear` for a result that is added to residual [R, outputs]. Returns None if it has been added
        (residual is mutated), else the result to add."""
        ...

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        pages: Tensor,
        layer: int,
        plan: P,
        shape: HeadShape,
        rope: RopeTables,
        norm: QkNormWeights | None,
    ) -> Tensor:
        """From the output qkv [R, (Q + 2 K) * D] of the fused linear layer: norm query and key heads if `norm` is
        given, and rotate both, before or after the norm. The rotation works on halves: x1 cos - x2 sin, x2 cos + x1
        sin. Write keys and values of real rows to `pages` (mutated) of `layer`. Return queries [R, Q * D], not scaled.
        May mutate qkv."""
        ...

    def paged_attention(
        self, query: Tensor, pages: Tensor, layer: int, plan: P, shape: HeadShape, rules: AttentionRules
    ) -> Tensor:
        """Compute attention: query [R, Q * D] -> [R, Q * D]. A row at position p sees the positions up to p of its
        sequence that the rules allow. scores = softcap(query . key * score_scale). Padding rows may have any value."""
        ...

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> None:
        """Mutates x [R, I] *= sigmoid(gate [R, I])."""
        ...

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        """[R, inputs] -> [R, I] = activation(first half) * second half of `linear`'s 2 * I outputs."""
        ...

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """[R, I] -> [R, I]."""
        ...

    def lm_head(self, x: Tensor, weight: Weight, softcap: float) -> Tensor:
        """Compute logits [R, V], float32 or of the type of x, from x [R, H], soft-capped if softcap is not 0."""
        ...

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Int32:
        """Sample token ids [N] from logits [N, V]; DAMAGED or NOTHING_LEFT (see step.py) where a row has no token.
        sampling.sampler has the exact definition."""
        ...

    def logprobs(self, logits: Tensor, token: Int32, wanted: Int32) -> LogprobColumns | None:
        """Compute logprobs of raw logits [N, V]: columns of the rows whose `wanted` [N] is not -1 and whose `token` [N]
        is not negative; None if there are no such rows. Raises Internal NAN_LOGITS if the largest logit of such a row
        is NaN or infinite."""
        ...

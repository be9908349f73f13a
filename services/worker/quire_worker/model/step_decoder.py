"""StepDecoder: the Protocol of classes that compute the rows of a step. `Decoder` implements it for Quire's own model
families, `TransformersDecoder` for the Transformers backend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire_worker.model.arch_spec import DecoderSpec
from quire_worker.model.mixers import Attend
from quire_worker.ops.interface import HeadShape, Ops, P


class StepDecoder(Protocol[P]):
    """Computes hidden rows and logits from token rows. Keys and values go to the pages that the plan names."""

    @property
    def spec(self) -> DecoderSpec:
        """The model's sizes and attention."""
        ...

    @property
    def ops(self) -> Ops[P]:
        """The operations that compute attention, sample and plan steps."""
        ...

    @property
    def head_shape(self) -> HeadShape:
        """Sizes of the heads, the same in all layers."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """Whether the results of a row have the same bits whatever else is in the step."""
        ...

    @property
    def can_be_cut(self) -> bool:
        """Whether a pass may be cut at attention, as `forward` does for `attend`."""
        ...

    @property
    def can_be_captured(self) -> bool:
        """Whether a pass may be captured in a CUDA graph."""
        ...

    @property
    def ops_compute_layers(self) -> bool:
        """Whether the ops compute all of a pass, and not only attention. Then bits depend on the ops alone."""
        ...

    def few_layers(self) -> StepDecoder[P]:
        """Return a decoder with as few layers as use all of its kernels, for compiling these kernels."""
        ...

    def forward(
        self, token: Tensor, pages: Tensor, plan: P, attend: Attend[P] | None = None, output_rows: Tensor | None = None
    ) -> Tensor:
        """Compute hidden [R, H], the input of `logits`, from token [R] int64, and write the rows' keys and values to
        `pages`. `attend`, if given, replaces attention and the linear layer after it. `output_rows` [N] int64, if
        given, names the rows whose hidden [N, H] is returned."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [N, V] from hidden [N, H]; N must be a multiple of the ops' row multiple."""
        ...

"""StepGraph: one captured step, either as one graph or in pieces, with attention launched by hand between them.

A graph cannot know where prompts begin in a step, and torch's attention of fresh ones asks for that. In pieces all else
of a step is captured: a piece ends where a layer's queries are ready and the next begins with what attention left, so
that a layer takes one launch more than its attention.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire_worker.cuda.graph_recorder import Recorder, Replayable, borrowed
from quire_worker.ops.triton.fresh_attention import best_backend

if TYPE_CHECKING:
    from quire_worker.cuda.step_body import StepBody
    from quire_worker.cuda.step_layout import StepLayout
    from quire_worker.ops.interface import HeadShape
    from quire_worker.ops.triton.attention_plan import TritonPlan
    from quire_worker.ops.triton.fresh_attention import Fresh


@dataclass(frozen=True, slots=True)
class _Gap:
    """What a layer's attention reads and writes between two pieces."""

    layer: int
    window: int
    query: Tensor
    turned: Tensor | None
    out: Tensor


class StepGraph:
    """Captures when made, on the current stream. `layout` is the size's: one that knows of fresh chunks only where
    `pieced`."""

    def __init__(self, body: StepBody, layout: StepLayout, recorder: Recorder, *, pieced: bool) -> None:
        self.layout = layout
        self._body = body
        self._pieces: list[Replayable] = []
        self._gaps: list[_Gap] = []
        # Columns of a step in which nobody runs: all rows are padding.
        layout.pack_nobody(body.uploaded)
        body.launch(layout)  # compiles what is not compiled, outside the capture
        self._plan = body.plan(layout)
        self._recorder = recorder
        recorder.begin()
        try:
            body.launch(layout, attend=self._cut if pieced else None)
            self._pieces.append(recorder.end())
        except BaseException:
            recorder.abandon()
            raise
        if body.logits is None:
            raise RuntimeError("a step without logits")
        self.logits = body.logits

    def layout_of(self, fresh: tuple[Fresh, ...], chunks: int) -> StepLayout:
        """How a step of so many chunks is packed for it, of which these are fresh."""
        return self.layout.leaving(fresh, chunks) if self._gaps else self.layout

    @torch.inference_mode()
    def replay(self, layout: StepLayout) -> None:
        """Launch the step that was packed by this layout, on the current stream."""
        if self._gaps:
            plan = replace(self._plan, fresh=layout.fresh)
            if not layout.tiled:
                plan.tile_sequence = None
            with best_backend(self._body.pages) if layout.fresh else contextlib.nullcontext():
                self._replay_pieces(plan)
        self._pieces[-1].replay()

    def _replay_pieces(self, plan: TritonPlan) -> None:
        decoder, pages = self._body.decoder, self._body.pages
        attend, shape = decoder.ops.paged_attention, decoder.head_shape
        for piece, gap in zip(self._pieces, self._gaps, strict=False):
            piece.replay()
            plan.turned, plan.out = gap.turned, gap.out
            attend(gap.query, pages, gap.layer, plan, shape, gap.window)

    def _cut(self, query: Tensor, pages: Tensor, layer: int, plan: TritonPlan, shape: HeadShape, window: int) -> Tensor:
        """Stands in for attention while captured: ends a piece and begins the next."""
        out = torch.empty_like(query)
        self._pieces.append(self._recorder.end())
        turned, plan.turned = plan.turned, None
        kept = None if turned is None else borrowed(turned)
        self._gaps.append(_Gap(layer, window, borrowed(query), kept, borrowed(out)))
        self._recorder.begin()
        return out

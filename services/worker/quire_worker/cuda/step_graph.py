"""StepGraph: one captured step, as one graph, or in pieces with torch's attention of fresh chunks between them.

A graph cannot know where prompts begin in a step. In pieces it need not: a piece ends where a layer's attention has
done what is cut into tiles and shares, fresh chunks are attended to by hand, and the next piece begins with the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quire_worker.cuda.graph_recorder import Recorder, Replayable, borrowed
from quire_worker.ops.triton.fresh_attention import best_backend, fresh_attention

if TYPE_CHECKING:
    from quire_worker.cuda.step_body import StepBody
    from quire_worker.cuda.step_layout import StepLayout
    from quire_worker.ops.interface import HeadShape
    from quire_worker.ops.triton.attention_plan import TritonPlan
    from quire_worker.ops.triton.fresh_attention import Fresh


class _Gap(NamedTuple):
    """What a layer's attention reads and writes between two pieces."""

    query: Tensor
    turned: Tensor
    out: Tensor


class StepGraph:
    """Captures when made, on the current stream; in pieces where the layout knows of fresh chunks."""

    def __init__(self, body: StepBody, layout: StepLayout, recorder: Recorder) -> None:
        self.layout = layout
        self._body = body
        self._recorder = recorder
        self._pieces: list[Replayable] = []
        self._gaps: list[_Gap] = []
        # Columns of a step in which nobody runs: all rows are padding.
        layout.pack_nobody(body.uploaded)
        body.launch(layout)  # compiles what is not compiled, outside the capture
        recorder.begin()
        try:
            body.launch(layout, attend=None if layout.fresh is None else self._attend)
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
        if layout.fresh:
            with best_backend(self._body.pages):
                self._replay_beside(layout.fresh)
        else:
            for piece in self._pieces:
                piece.replay()

    def _replay_beside(self, fresh: tuple[Fresh, ...]) -> None:
        shape = self._body.decoder.head_shape
        for piece, gap in zip(self._pieces, self._gaps, strict=False):
            piece.replay()
            fresh_attention(gap.query, gap.turned, fresh, shape, gap.out)
        self._pieces[-1].replay()

    def _attend(
        self, query: Tensor, pages: Tensor, layer: int, plan: TritonPlan, shape: HeadShape, window: int
    ) -> Tensor:
        """Attention as it is captured: ends a piece and begins the next."""
        out = self._body.decoder.ops.paged_attention(query, pages, layer, plan, shape, window)
        self._pieces.append(self._recorder.end())
        turned, plan.turned = plan.turned, None
        if turned is None:
            raise RuntimeError("nothing was kept for fresh chunks")
        self._gaps.append(_Gap(borrowed(query), borrowed(turned), borrowed(out)))
        self._recorder.begin()
        return out

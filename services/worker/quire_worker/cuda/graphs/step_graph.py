"""StepGraph: one captured step, as one graph, or in pieces with torch's attention of fresh chunks between them.

A graph cannot know where prompts begin in a step. In pieces it need not: a piece ends where a layer's attention has
done the rows that decode; the chunks are attended to by hand, in tiles or fresh, as is the product behind attention, so
that nothing is copied and nothing done for chunks that are not there; and the next piece begins with the result.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quire_worker.cuda.graphs.graph_recorder import Recorder, Replayable, borrowed
from quire_worker.ops.triton.attention import prefill_attention
from quire_worker.ops.triton.fresh_attention import best_backend, fresh_attention
from quire_worker.ops.triton.gemm import gemm_add, gemm_into
from quire_worker.ops.triton.launch import empty_like_rows

if TYPE_CHECKING:
    from quire_worker.cuda.step_body import StepBody
    from quire_worker.cuda.step_layout import StepLayout
    from quire_worker.ops.triton.attention_plan import TritonPlan
    from quire_worker.ops.triton.fresh_attention import Fresh
    from quire_worker.ops.weight import Weight


class _Gap(NamedTuple):
    """What is read and written between two pieces."""

    layer: int
    window: int
    query: Tensor
    turned: Tensor
    attended: Tensor
    """[R, Q D]: rows of chunks are missing."""
    weight: Weight
    result: Tensor
    """[R, H]: all rows of the product are missing."""
    adds: bool
    """Whether the product is added to what lies there."""

    def put(self, begin: int, end: int, attended: Tensor) -> None:
        """Rows of the product, of what they attended to."""
        if self.adds:
            gemm_add(self.result[begin:end], attended, self.weight)
        else:
            gemm_into(self.result[begin:end], attended, self.weight)


class StepGraph:
    """Captures when made, on the current stream; in pieces where the layout knows of fresh chunks."""

    def __init__(self, body: StepBody, layout: StepLayout, recorder: Recorder) -> None:
        self.layout = layout
        self._body = body
        self._recorder = recorder
        self._pieces: list[Replayable] = []
        self._gaps: list[_Gap] = []
        self._plan: TritonPlan | None = None
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
        self._body.advanced = False
        if self._gaps:
            with best_backend(self._body.pages) if layout.fresh else contextlib.nullcontext():
                self._replay_pieces(layout)
        self._body.advanced = True  # controls and draws are in the last piece
        self._pieces[-1].replay()

    def _replay_pieces(self, layout: StepLayout) -> None:
        shape, pages = self._body.decoder.head_shape, self._body.pages
        fresh, others, tiles = layout.fresh or (), layout.others, self._plan if layout.tiled else None
        for piece, gap in zip(self._pieces, self._gaps, strict=False):

            def leave(chunk: Fresh, rows: Tensor, gap: _Gap = gap) -> None:
                gap.put(chunk.row, chunk.row + chunk.tokens, rows)

            piece.replay()
            if tiles is not None:
                prefill_attention(gap.query, pages, gap.layer, tiles, shape, gap.window, gap.attended, pdl=False)
            fresh_attention(gap.query, gap.turned, fresh, shape, leave)
            for begin, end in others:
                gap.put(begin, end, gap.attended[begin:end])

    def _attend(
        self,
        query: Tensor,
        pages: Tensor,
        layer: int,
        plan: TritonPlan,
        window: int,
        weight: Weight,
        onto: Tensor | None,
    ) -> Tensor | None:
        """Attention, and the product behind it, as they are captured: ends a piece and begins the next."""
        decoder, self._plan = self._body.decoder, plan
        untiled = replace(plan, tile_sequence=None)
        attended = decoder.ops.paged_attention(query, pages, layer, untiled, decoder.head_shape, window)
        result = empty_like_rows(query, weight.outputs) if onto is None else onto
        self._pieces.append(self._recorder.end())
        turned, plan.turned = plan.turned, None
        if turned is None:
            raise RuntimeError("nothing was kept for fresh chunks")
        places = borrowed(query), borrowed(turned), borrowed(attended)
        self._gaps.append(_Gap(layer, window, *places, weight, borrowed(result), onto is not None))
        self._recorder.begin()
        return result if onto is None else None

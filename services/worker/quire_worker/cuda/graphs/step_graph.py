"""StepGraph: one captured step, as one graph, or in pieces, between which torch's attention of fresh chunks is
launched.

A fresh chunk is a long prompt that begins in this step and is left to torch's attention. A graph cannot know where
prompts begin in a step, and a step in pieces need not. A piece ends where a layer's attention of the decode rows is
done. Then attention of the chunks, in tiles or by torch, and the output projection are launched outside any graph. So
nothing is copied, and nothing is computed for absent chunks. The next piece begins with their result.
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
from quire_worker.ops.triton.sigmoid_gate import sigmoid_gate

if TYPE_CHECKING:
    from quire_worker.cuda.step_body import StepBody
    from quire_worker.cuda.step_layout import StepLayout
    from quire_worker.model.mixers import AttentionInput
    from quire_worker.ops.interface import AttentionRules
    from quire_worker.ops.triton.attention_plan import TritonPlan
    from quire_worker.ops.triton.fresh_attention import Fresh
    from quire_worker.ops.weight import Weight


class _EagerAttention(NamedTuple):
    """One layer's attention of chunks, and their output projection, which are launched between two graph pieces."""

    layer: int
    rules: AttentionRules
    query: Tensor
    turned: Tensor
    attended: Tensor
    """[R, Q D]: rows of chunks are missing."""
    gate: Tensor | None
    """See `AttentionInput`."""
    weight: Weight
    result: Tensor
    """[R, H]: where the output projection goes; no graph computes any row of it."""
    adds: bool
    """Whether the projection is added to what `result` holds."""

    def project(self, begin: int, end: int, attended: Tensor) -> None:
        """Multiply `attended`, which is attention's output for rows `begin` to `end` (exclusive), by the sigmoid of the
        gate in place, if there is a gate, and then by the weight of the output projection. The result goes into these
        rows of `result` or, with `adds`, is added to them."""
        if self.gate is not None:
            sigmoid_gate(attended, self.gate[begin:end], pdl=False)
        if self.adds:
            gemm_add(self.result[begin:end], attended, self.weight)
        else:
            gemm_into(self.result[begin:end], attended, self.weight)


class StepGraph:
    """Captures when made, on the current stream; in pieces where the layout knows of fresh chunks. Before that, a step
    of padding runs once, so that its kernels are compiled; it overwrites the body's `uploaded`."""

    def __init__(self, body: StepBody, layout: StepLayout, recorder: Recorder) -> None:
        self.layout = layout
        self._body = body
        self._recorder = recorder
        self._pieces: list[Replayable] = []
        self._eager: list[_EagerAttention] = []
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
        """The layout by which a step of `chunks` prefill chunks must be packed for this graph; in pieces, the chunks in
        `fresh` have no tiles."""
        return self.layout.leaving(fresh, chunks) if self._eager else self.layout

    def replay(self, layout: StepLayout) -> None:
        """Launch the step that was packed by this layout, on the current stream. In pieces, attention of prompt chunks
        is launched between them. `advanced` of the body is False until just before the last graph. The graphs'
        own replay runs no torch operation, so only the attention between them needs inference mode."""
        self._body.advanced = False
        if self._eager:
            with best_backend(self._body.pages) if layout.fresh else contextlib.nullcontext():
                self._replay_pieces(layout)
        self._body.advanced = True  # controls and sampling are in the last piece
        self._pieces[-1].replay()

    @torch.inference_mode()
    def _replay_pieces(self, layout: StepLayout) -> None:
        """Replay all pieces but the last and, after each, launch one layer's attention of prompt chunks, and its output
        projection for these chunks and the decode rows."""
        shape, pages = self._body.decoder.head_shape, self._body.pages
        fresh, others, tiles = layout.fresh or (), layout.others, self._plan if layout.tiled else None
        for piece, eager in zip(self._pieces, self._eager, strict=False):

            def leave(chunk: Fresh, rows: Tensor, eager: _EagerAttention = eager) -> None:
                eager.project(chunk.row, chunk.row + chunk.tokens, rows)

            piece.replay()
            if tiles is not None:
                prefill_attention(eager.query, pages, eager.layer, tiles, shape, eager.rules, eager.attended, pdl=False)
            fresh_attention(eager.query, eager.turned, fresh, shape, leave)
            for begin, end in others:
                eager.project(begin, end, eager.attended[begin:end])

    def _attend(
        self,
        inputs: AttentionInput,
        pages: Tensor,
        layer: int,
        plan: TritonPlan,
        rules: AttentionRules,
        weight: Weight,
        onto: Tensor | None,
    ) -> Tensor | None:
        """Replace a layer's attention during the capture. Capture the attention of decode rows, end the piece, note the
        tensors with which `replay` does the rest, and begin the next piece. Returns the projection's tensor; None if it
        is added to `onto`."""
        (query, gate), decoder, self._plan = inputs, self._body.decoder, plan
        untiled = replace(plan, tile_sequence=None)
        attended = decoder.ops.paged_attention(query, pages, layer, untiled, decoder.head_shape, rules)
        result = empty_like_rows(query, weight.outputs) if onto is None else onto
        self._pieces.append(self._recorder.end())
        turned, plan.turned = plan.turned, None
        if turned is None:
            raise RuntimeError("nothing was kept for fresh chunks")
        places = borrowed(query), borrowed(turned), borrowed(attended), None if gate is None else borrowed(gate)
        self._eager.append(_EagerAttention(layer, rules, *places, weight, borrowed(result), onto is not None))
        self._recorder.begin()
        return result if onto is None else None

"""StepGraphCache: captured steps by size. A few are captured before the first request, the others while nothing runs or
when a step needs them.

A capture takes several times as long as the launches that it saves. There are many fine sizes (see fine_sizes) and many
sizes in pieces (see pieced_sizes). So such a size is captured while a step waits only if 16 or 4 steps have needed it.
Until then, these steps use a larger graph or, if none suits, run kernel by kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire_worker.cuda.graphs.graph_cache import GraphCache
from quire_worker.cuda.graphs.graph_recorder import GraphRecorder
from quire_worker.cuda.graphs.step_graph import StepGraph
from quire_worker.cuda.step_layout import StepLayout, Tiling
from quire_worker.cuda.step_size import MOST_PADDED_ROWS, StepSize, fine_sizes, graph_sizes, pieced_sizes
from quire_worker.ops.triton.fresh_attention import PIECE

if TYPE_CHECKING:
    from quire_worker.cuda.step_body import StepBody

# A step in pieces has a graph for each layer.
_MOST_PIECED = 64
_PIECED_IN_ADVANCE = 16
# The fourth step that needs a missing size in pieces waits for its capture; for a fine size, the sixteenth. A graph in
# pieces saves many launches, and a fine graph only saves padding.
_WANTS_OF_PIECED, _WANTS_OF_FINE = 4, 16


class StepGraphCache:
    """The captured steps of the model thread. `stream` is the stream of steps; captures do not wait for steps, nor
    steps for captures. `max_tokens` is the limit of tokens in a step, and `reserve` the bytes that the largest step
    takes. `fresh`: torch's attention may compute some chunks."""

    def __init__(
        self,
        body: StepBody,
        tiling: Tiling,
        stream: torch.cuda.Stream,
        max_num_seqs: int,
        max_tokens: int,
        reserve: int,
        *,
        fresh: bool,
    ) -> None:
        self._body = body
        self._tiling = tiling
        self._stream = stream
        with torch.cuda.stream(stream):
            self._recorder = GraphRecorder(reserve)
        masked = body.masks is not None
        coarse, fine = graph_sizes(max_num_seqs, max_tokens, masked=masked), fine_sizes(max_num_seqs, max_tokens)
        pieced = pieced_sizes(max_num_seqs, max_tokens, PIECE, masked=masked)
        in_advance = [*(size for size in coarse if size.in_advance), *fine]
        self._whole = GraphCache(
            fine,
            in_advance,
            lambda size: self._capture(size, fresh=False),
            len(coarse) + len(fine),
            _WANTS_OF_FINE,
            at_once=coarse,
        )
        # Without fresh chunks full steps are whole graphs.
        in_advance = pieced[:_PIECED_IN_ADVANCE] if fresh else []
        self._pieced = GraphCache(
            pieced, in_advance, lambda size: self._capture(size, fresh=fresh), _MOST_PIECED, _WANTS_OF_PIECED
        )

    def find(self, wanted: StepSize, *, fresh: bool) -> StepGraph | None:
        """Return the graph of the smallest size that suits: a whole step or, if none suits and the wanted step has more
        than MOST_PADDED_ROWS prefill rows, a step in pieces. If this graph is missing, it is captured now, or its
        capture is postponed (see GraphCache) and the smallest usable larger graph is returned. None: no graph suits. If
        torch's attention computes some chunk (`fresh`), only steps in pieces suit. An error of a capture is raised."""
        found = None if fresh else self._whole.find(wanted)
        if found is None and wanted.rows > MOST_PADDED_ROWS:
            found = self._pieced.find(wanted)
        return found

    def capture(self, count: int) -> bool:
        """Capture the next `count` sizes that are queued, whole steps before steps in pieces; returns whether some are
        left."""
        for _ in range(count):
            (self._whole if self._whole.has_missing else self._pieced).capture_next()
        return self._whole.has_missing or self._pieced.has_missing

    def give_up(self) -> None:
        """Capture nothing more; the graphs that exist stay in use."""
        self._whole.give_up()
        self._pieced.give_up()

    def _capture(self, size: StepSize, *, fresh: bool) -> StepGraph:
        """Capture a step of this size on the steps' stream; with `fresh`, in pieces, so that torch's attention can
        compute some chunks. If memory runs out, empty torch's cache of memory and try once more."""
        layout = StepLayout.of(size, self._tiling, fresh=fresh)
        with torch.cuda.stream(self._stream):
            try:
                return StepGraph(self._body, layout, self._recorder)
            except torch.OutOfMemoryError:
                # Unlike a launch, a capture cannot take what torch's allocator keeps of earlier launches.
                torch.cuda.empty_cache()
                return StepGraph(self._body, layout, self._recorder)

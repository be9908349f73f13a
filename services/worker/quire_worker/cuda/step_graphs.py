"""StepGraphs: captured steps by size, a few before the first request, the others while nothing runs or when wanted.

All graphs share one memory pool: steps run one after the other, so what one leaves behind the next may overwrite.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire_worker.cuda.step_layout import StepLayout, Tiling
from quire_worker.cuda.step_size import StepSize, least_that_holds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_worker.cuda.step_body import StepBody

# Wanted sizes whose graphs are remembered.
_MOST_CHOSEN = 65_536


class StepGraph:
    """One captured step."""

    def __init__(self, layout: StepLayout, graph: torch.cuda.CUDAGraph, logits: Tensor) -> None:
        self.layout = layout
        self.logits = logits
        self._graph = graph

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()


class StepGraphs:
    """Belongs to the model thread. `stream` is the one that steps run on: a capture waits for no step, and no step for
    a capture."""

    def __init__(self, body: StepBody, tiling: Tiling, sizes: Sequence[StepSize], stream: torch.cuda.Stream) -> None:
        self._body = body
        self._tiling = tiling
        self._sizes = sizes
        self._missing = deque(size for size in sizes if size.in_advance)
        self._stream = stream
        self._graphs: dict[StepSize, StepGraph] = {}
        self._chosen: dict[StepSize, StepGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def find(self, wanted: StepSize) -> StepGraph | None:
        """The smallest step that holds the wanted size, captured now if it was not; None: no size is large enough."""
        if wanted not in self._chosen:
            if len(self._chosen) >= _MOST_CHOSEN:
                self._chosen.clear()
            size = least_that_holds(self._sizes, wanted)
            self._chosen[wanted] = None if size is None else self._graph(size)
        return self._chosen[wanted]

    def capture(self, count: int) -> bool:
        """Capture the next `count` sizes that are missing; whether some are left."""
        while count and self._missing:
            self._graph(self._missing.popleft())
            count -= 1
        while self._missing and self._missing[0] in self._graphs:
            self._missing.popleft()
        return bool(self._missing)

    def give_up(self) -> None:
        """Make do with what is captured."""
        self._missing.clear()
        self._sizes = tuple(self._graphs)
        self._chosen.clear()

    def _graph(self, size: StepSize) -> StepGraph:
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        return self._graphs[size]

    def _capture(self, size: StepSize) -> StepGraph:
        layout = StepLayout.of(size, self._tiling)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Columns of a step in which nobody runs: all rows are padding.
            layout.pack_nobody(self._body.uploaded)
            self._body.launch(layout)  # compiles what is not compiled, outside the capture
            # Not torch.cuda.graph(): it empties torch's cache of memory each time, which takes ten times as long.
            # Other threads wait for events meanwhile, so only this one's calls are watched.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._body.launch(layout)
            finally:
                graph.capture_end()
        logits = self._body.logits
        if logits is None:
            raise RuntimeError("a step without logits")
        return StepGraph(layout, graph, logits)

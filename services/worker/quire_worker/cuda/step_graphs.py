"""StepGraphs: captured steps by size, a few before the first request, the others while nothing runs.

All graphs share one memory pool: steps run one after the other, so what one leaves behind the next may overwrite.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire_common.telemetry.logs import get_logger
from quire_worker.cuda.step_layout import StepLayout
from quire_worker.cuda.step_size import StepSize, least_that_holds

if TYPE_CHECKING:
    from quire_worker.cuda.step_body import StepBody

log = get_logger(__name__)


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
    """Belongs to the model thread."""

    def __init__(self, body: StepBody, tile_tokens: int, sizes: Sequence[StepSize]) -> None:
        self._body = body
        self._tile_tokens = tile_tokens
        self._missing = list(sizes)
        self._graphs: dict[StepSize, StepGraph] = {}
        self._chosen: dict[StepSize, StepGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def complete(self) -> bool:
        """Whether all sizes are captured."""
        return not self._missing

    def find(self, wanted: StepSize) -> StepGraph | None:
        """The smallest captured step that holds the wanted size; None: there is none yet."""
        if wanted not in self._chosen:
            size = least_that_holds(self._graphs, wanted)
            self._chosen[wanted] = None if size is None else self._graphs[size]
        return self._chosen[wanted]

    def capture(self, limit_s: float) -> int:
        """Capture missing sizes, in order, until the time is over; returns how many. Nothing may run meanwhile."""
        begin, before = time.perf_counter(), len(self._graphs)
        while self._missing and time.perf_counter() - begin < limit_s:
            size = self._missing.pop(0)
            self._graphs[size] = self._capture(size)
        if len(self._graphs) > before:
            self._chosen.clear()
        return len(self._graphs) - before

    def _capture(self, size: StepSize) -> StepGraph:
        layout = StepLayout.of(size, self._tile_tokens)
        # Columns of a step in which nobody runs: all rows are padding.
        layout.pack_nobody(self._body.uploaded)
        self._body.launch(layout)  # compiles what is not compiled, outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._body.launch(layout)
        logits = self._body.logits
        if logits is None:
            raise RuntimeError("a step without logits")
        return StepGraph(layout, graph, logits)

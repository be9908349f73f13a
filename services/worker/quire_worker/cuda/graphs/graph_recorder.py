"""GraphRecorder: records the launches on the current stream between `begin` and `end` as a CUDA graph.

All graphs share one memory pool. Steps run one after the other, so a step may overwrite the memory of the step before.
A tensor of a graph is therefore valid only until memory of the pool is requested again, unless a reference keeps it.
`borrowed` makes a tensor without such a reference, for memory that is only used between two graphs of one step.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Protocol

import torch
from torch import Tensor


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        ...


class Recorder(Protocol):
    """Captures graphs, one at a time, on one thread."""

    def begin(self) -> None:
        """Begin a capture: from here on, launches are recorded and not run."""
        ...

    def end(self) -> Replayable:
        """End the capture, and return the launches since `begin` as a graph."""
        ...

    def abandon(self) -> None:
        """End a capture after a failed launch; does nothing if none was begun."""
        ...


class GraphRecorder:
    """Implements Recorder. `reserve` is a number of bytes: at the start, the pool takes one block of this size for the
    current stream, and the memory of graphs is cut from this block (see reserve_memory)."""

    def __init__(self, reserve: int = 0) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._open: torch.cuda.CUDAGraph | None = None
        self._gc_was_enabled = False
        # Never replayed. The pool lives as long as a graph of it.
        self._first = self._reserve(reserve) if reserve else None

    def begin(self) -> None:
        """Begin to capture this thread's launches on the current stream, with memory of the shared pool.

        Python's garbage collector stands still until the capture ends: a CUDA graph that the collector destroys during
        a capture makes the capture fail."""
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(): it empties torch's cache of memory each time, which takes ten times as long.
        self._gc_was_enabled = gc.isenabled()
        gc.disable()
        try:
            # Other threads wait for events meanwhile, so only this one's calls are watched.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._resume_collector()
            raise
        self._open = graph

    def _reserve(self, size: int) -> torch.cuda.CUDAGraph | None:
        """Capture a graph that allocates `size` bytes, so that the pool has one block of this size, and return the
        graph. None if the GPU has no such block."""
        self.begin()
        try:
            torch.empty(size, dtype=torch.uint8, device="cuda")[:1].zero_()
        except torch.OutOfMemoryError:
            self.abandon()
            return None
        return self.end()

    def end(self) -> torch.cuda.CUDAGraph:
        """End the capture, let Python's garbage collector go on, and return the graph. Raises RuntimeError if none was
        begun, and errors of the capture."""
        graph, self._open = self._open, None
        if graph is None:
            raise RuntimeError("no graph was begun")
        try:
            graph.capture_end()
        finally:
            self._resume_collector()
        return graph

    def abandon(self) -> None:
        """End a capture in which a launch failed, drop it, and let Python's garbage collector go on; does nothing if
        none was begun. A RuntimeError of the end is ignored."""
        graph, self._open = self._open, None
        if graph is not None:
            # The error that is told is the launch's own.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            self._resume_collector()

    def _resume_collector(self) -> None:
        """Let the garbage collector run again, if it ran before the capture."""
        if self._gc_was_enabled:
            gc.enable()


class _Memory:
    """A contiguous tensor's memory, as torch.as_tensor takes it from others."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def borrowed(tensor: Tensor) -> Tensor:
    """Return a tensor over the same GPU memory that does not keep the memory allocated: after the original is gone,
    other tensors may get the memory. Must not be called during a capture. A CPU tensor is returned unchanged."""
    if not tensor.is_cuda:
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)

"""A tape records the jobs of a forward pass. Later steps with as many rows replay the tape without Python between jobs,
as a CUDA graph does on a GPU.

A job's arguments are addresses and sizes, which stay valid as long as no buffer is replaced. Tokens, positions and
pages differ from step to step, but lie at addresses that stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire_worker.arrays import Int64
from quire_worker.ops.cpu.job import ARGUMENTS, COST_NS, FUNCTION, JOB_WORDS, MAX_THREADS, NUM_ITEMS, Job

_VIEW_OPERATIONS: Final = (torch.ops.aten.view.default, torch.ops.aten.slice.Tensor)


class StepTape:
    """The jobs of one pass, in order. The tape owns copies of their arguments."""

    def __init__(self, rows: int, buffer_version: tuple[int, ...]) -> None:
        self.token = torch.zeros(rows, dtype=torch.int64)
        """The tensor from which the pass reads its tokens."""
        self.buffer_version = buffer_version
        """Identifies the buffers whose addresses the jobs hold. The tape is valid only for these buffers."""
        self.result: tuple[Tensor, Tensor | None] = self.token, None
        """The result of the recorded pass. Meaningless before `record_pass`."""
        self.is_complete = False
        """True if the jobs are all that the pass computed, so that the tape may be replayed."""
        self.jobs: Int64 = np.zeros((0, JOB_WORDS), np.int64)
        """[jobs, JOB_WORDS]."""
        self._arguments: list[Int64] = []
        self._words: list[Int64] = []

    def add_job(self, job: Job) -> None:
        """Record a job that has just run: append copies of its arguments and of its words, which point to the copied
        arguments."""
        arguments, words = job.arguments.copy(), job.words.copy()
        words[ARGUMENTS] = arguments.ctypes.data
        self._arguments.append(arguments)
        self._words.append(words)

    def record_pass(self, run: Callable[[Tensor], tuple[Tensor, Tensor | None]]) -> None:
        """Run a pass on the tape's token tensor and keep its result. Meanwhile the job runner calls `add_job` for each
        job.

        `is_complete` becomes False if torch itself computed something, other than by `view` or slices. A pass that runs
        no job raises ValueError.
        """
        with _torch_operations() as seen:
            self.result = run(self.token)
        self.is_complete = not seen
        self.jobs = np.stack(self._words)

    def set_job_items(self, job: Job, num_items: int, cost_ns: int, max_threads: int) -> None:
        """Set items, cost and most threads of all recorded jobs that have the same kernel as `job`."""
        selected = self.jobs[:, FUNCTION] == job.words[FUNCTION]
        self.jobs[selected, NUM_ITEMS], self.jobs[selected, COST_NS], self.jobs[selected, MAX_THREADS] = (
            num_items,
            cost_ns,
            max_threads,
        )


@contextmanager
def _torch_operations() -> Iterator[list[str]]:
    """Yield a list to which the names of the operations are added that torch computes within the context. Only `view`
    and slices are not added; other views, such as x[0] or a transpose, count as computed."""
    seen: list[str] = []

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate its base
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in _VIEW_OPERATIONS:
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():  # type: ignore[no-untyped-call]  # as above
        yield seen

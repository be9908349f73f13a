"""The jobs of a decoder's pass, to run them again for later steps of as many rows without Python between the jobs: what
a CUDA graph is on a GPU.

A job's arguments are addresses and sizes, which stay right as long as no buffer is replaced. What differs from step to
step (tokens, positions, pages) lies behind addresses that stay the same.
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
    """The jobs of one pass, in order, with arguments of their own."""

    def __init__(self, rows: int, buffer_version: tuple[int, ...]) -> None:
        self.token = torch.zeros(rows, dtype=torch.int64)
        """Where the pass reads its tokens."""
        self.buffer_version = buffer_version
        """The jobs may be replayed only while this key is the same."""
        self.result: tuple[Tensor, Tensor | None] = self.token, None
        """The result of the recorded pass; without meaning before `record`."""
        self.is_complete = False
        """True if the jobs are all that the pass computed."""
        self.jobs: Int64 = np.zeros((0, JOB_WORDS), np.int64)
        """[jobs, JOB_WORDS]."""
        self._arguments: list[Int64] = []
        self._words: list[Int64] = []

    def add_job(self, job: Job) -> None:
        """Record a job that has just run."""
        arguments, words = job.arguments.copy(), job.words.copy()
        words[ARGUMENTS] = arguments.ctypes.data
        self._arguments.append(arguments)
        self._words.append(words)

    def record_pass(self, run: Callable[[Tensor], tuple[Tensor, Tensor | None]]) -> None:
        """Run a pass on the tokens and keep its result. `add` is called for each of its jobs meanwhile."""
        with _torch_operations() as seen:
            self.result = run(self.token)
        self.is_complete = not seen
        self.jobs = np.stack(self._words)

    def set_job_items(self, job: Job, num_items: int, cost_ns: int, max_threads: int) -> None:
        """Give all jobs of this one's kernel so many items."""
        selected = self.jobs[:, FUNCTION] == job.words[FUNCTION]
        self.jobs[selected, NUM_ITEMS], self.jobs[selected, COST_NS], self.jobs[selected, MAX_THREADS] = (
            num_items,
            cost_ns,
            max_threads,
        )


@contextmanager
def _torch_operations() -> Iterator[list[str]]:
    """The names of the operations that torch itself computes within the context."""
    seen: list[str] = []

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate its base
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in _VIEW_OPERATIONS:
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():  # type: ignore[no-untyped-call]  # as above
        yield seen

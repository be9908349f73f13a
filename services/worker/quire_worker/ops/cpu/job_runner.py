"""Splits a job over as many threads as torch has right now, and never more than when this was made. Knows nothing of
what a job computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from quire_worker.ops.cpu.job import COST_NS, MAX_THREADS, NUM_ITEMS, Job
from quire_worker.ops.cpu.kernel_thread_pool import THREAD_POOL
from quire_worker.ops.cpu.step_tape import StepTape

_MIN_THREAD_COST_NS: Final = 1 << 14
"""Smallest cost of a thread's part, in about nanoseconds. Below it, handing out the part takes longer than it saves."""


class JobRunner:
    """The threads of one model's kernels. The caller computes a part too."""

    def __init__(self) -> None:
        self.max_threads = torch.get_num_threads()
        THREAD_POOL.ensure_helpers(self.max_threads - 1)
        self._tape: StepTape | None = None

    def run_job(self, job: Job, num_items: int, cost_ns: int, *arguments: int) -> None:
        """Run items 0..count of the job, with these arguments if there are any.

        `cost`: of all items, in about nanoseconds of one thread.
        """
        if arguments:
            job.arguments[:] = arguments
        job.words[NUM_ITEMS], job.words[COST_NS], job.words[MAX_THREADS] = (
            num_items,
            cost_ns,
            self.threads_for(cost_ns, num_items),
        )
        THREAD_POOL.run_jobs(job.words)
        if self._tape is not None:
            self._tape.add_job(job)

    @contextmanager
    def recording(self, tape: StepTape) -> Iterator[None]:
        """Jobs that run within the context are recorded, too."""
        self._tape = tape
        try:
            yield
        finally:
            self._tape = None

    def threads_for(self, cost_ns: int, num_items: int) -> int:
        """The most threads that a job of this cost and number of items may have."""
        return max(1, min(self.max_threads, torch.get_num_threads(), cost_ns // _MIN_THREAD_COST_NS, num_items))

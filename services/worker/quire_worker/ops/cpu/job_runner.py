"""Runs jobs, decides how many threads share a job, and records jobs on a tape. This module knows nothing of what a job
computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from quire_worker.ops.cpu.job import COST_NS, MAX_THREADS, NUM_ITEMS, Job
from quire_worker.ops.cpu.kernel_thread_pool import THREAD_POOL
from quire_worker.ops.cpu.step_tape import StepTape

_MIN_THREAD_COST_NS: Final = 1 << 14
"""Smallest cost of a thread's share of a job. To hand out a smaller share takes longer than it saves."""


class JobRunner:
    """Runs the jobs of one model. A job gets at most as many threads as torch has now, and had when this was made."""

    def __init__(self) -> None:
        self.max_threads = torch.get_num_threads()
        THREAD_POOL.ensure_helpers(self.max_threads - 1)
        self._tape: StepTape | None = None

    def run_job(self, job: Job, num_items: int, cost_ns: int, *arguments: int) -> None:
        """Run all items of a job on the thread pool, and return when they are done. `arguments`, if there are any,
        replace the arguments of the job. While `recording`, the job is then added to the tape.

        `cost_ns`: estimate of the time that one thread would take for all items. It limits the number of threads.
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
        """Record on the tape the jobs that run within the context. Recording ends with the context, also after an
        error."""
        self._tape = tape
        try:
            yield
        finally:
            self._tape = None

    def threads_for(self, cost_ns: int, num_items: int) -> int:
        """Return how many threads may share a job of this cost and number of items."""
        return max(1, min(self.max_threads, torch.get_num_threads(), cost_ns // _MIN_THREAD_COST_NS, num_items))

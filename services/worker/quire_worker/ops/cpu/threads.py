"""Splits a job over as many threads as torch has right now, and never more than when this was made. Knows nothing of
what a job computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from quire_worker.ops.cpu.job import COST_NS, COUNT, THREADS, Job
from quire_worker.ops.cpu.kernel_team import TEAM
from quire_worker.ops.cpu.step_tape import StepTape

_LEAST_COST: Final = 1 << 14
"""Smallest cost of a thread's part, in about nanoseconds. Below it, handing out the part takes longer than it saves."""


class CpuThreads:
    """The threads of one model's kernels. The caller computes a part too."""

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        TEAM.grow(self.count - 1)
        self._tape: StepTape | None = None

    def run(self, job: Job, count: int, cost: int, *arguments: int) -> None:
        """Run items 0..count of the job, with these arguments if there are any.

        `cost`: of all items, in about nanoseconds of one thread.
        """
        if arguments:
            job.arguments[:] = arguments
        job.words[COUNT], job.words[COST_NS], job.words[THREADS] = count, cost, self.threads(cost, count)
        TEAM.run(job.words)
        if self._tape is not None:
            self._tape.add(job)

    @contextmanager
    def recording(self, tape: StepTape) -> Iterator[None]:
        """Jobs that run within the context are recorded, too."""
        self._tape = tape
        try:
            yield
        finally:
            self._tape = None

    def threads(self, cost: int, count: int) -> int:
        """The most threads that a job of this cost and number of items may have."""
        return max(1, min(self.count, torch.get_num_threads(), cost // _LEAST_COST, count))

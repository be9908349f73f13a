"""Splits a job over as many threads as torch has right now, and never more than when this was made. Knows nothing of
what a job computes."""

from __future__ import annotations

from typing import Final

import torch

from quire_worker.ops.job import Job
from quire_worker.ops.kernel_team import TEAM

_LEAST_COST: Final = 1 << 14
"""Smallest cost of a thread's part, in about nanoseconds. Below it, handing out the part takes longer than it saves."""


class CpuThreads:
    """The threads of one model's kernels. The caller computes a part too."""

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        TEAM.grow(self.count - 1)

    def run(self, job: Job, count: int, cost: int, *arguments: int, chunk_multiple: int = 1) -> None:
        """Give the job these arguments, if there are any, and run its items 0..count.

        `cost`: of all items, in about nanoseconds of one thread. `chunk_multiple`: see `KernelTeam.run`.
        """
        if arguments:
            job.arguments[:] = arguments
        threads = max(1, min(self.count, torch.get_num_threads(), cost // _LEAST_COST, count))
        TEAM.run(job, count, threads, cost, chunk_multiple)

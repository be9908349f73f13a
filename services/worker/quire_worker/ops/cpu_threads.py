"""Splits a kernel's work over as many threads as torch has right now, and never more than when this was made. Knows
nothing of what a kernel computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

from quire_worker.arrays import Int64
from quire_worker.ops.kernel_team import TEAM

_LEAST_COST: Final = 1 << 18
"""Smallest cost of a part, in about nanoseconds. Below it, waking a pool thread takes longer than it saves."""
_LEAST_JOB_COST: Final = 1 << 14
"""The same for a part of a kernel-team job, whose helpers are usually awake."""


class CpuThreads:
    """Kernels take (first, last, ...) and must not depend on how their range is cut. The caller computes a part too."""

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        TEAM.grow(self.count - 1)
        self._pool = ThreadPoolExecutor(self.count - 1, "quire-kernel") if self.count > 1 else None

    def rows(self, kernel: Callable[..., None], rows: int, row_cost: int, *arguments: Any) -> None:
        """Equal parts of `rows`."""
        parts = self._parts(rows * row_cost)
        self._run(kernel, [rows * part // parts for part in range(parts + 1)], [arguments] * parts)

    def items(self, kernel: Callable[..., None], cost: Int64, arguments: Callable[[int], tuple[Any, ...]]) -> None:
        """Parts of about equal cost; `arguments` of a part's number, so that each has memory of its own."""
        reached = np.cumsum(cost)
        whole = int(reached[-1]) if reached.size else 0
        parts = self._parts(whole)
        cuts = [int(np.searchsorted(reached, whole * part // parts)) for part in range(1, parts)]
        self._run(kernel, [0, *cuts, cost.size], [arguments(part) for part in range(parts)])

    def job(self, function: int, count: int, cost: int, arguments: int) -> None:
        """Equal parts of `count` by the team's helpers; see kernel_team. `cost` is that of one."""
        TEAM.run(function, count, arguments, min(self._parts(count * cost, _LEAST_JOB_COST), count), count * cost)

    def _parts(self, cost: int, least: int = _LEAST_COST) -> int:
        return max(1, min(self.count, torch.get_num_threads(), cost // least))

    def _run(self, kernel: Callable[..., None], cuts: list[int], arguments: list[tuple[Any, ...]]) -> None:
        if self._pool is None or len(arguments) == 1:
            kernel(cuts[0], cuts[-1], *arguments[0])
            return
        others = [
            self._pool.submit(kernel, cuts[part], cuts[part + 1], *arguments[part]) for part in range(1, len(arguments))
        ]
        kernel(cuts[0], cuts[1], *arguments[0])
        for other in others:
            other.result()

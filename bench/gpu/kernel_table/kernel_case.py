"""KernelCase: one kernel of a step at one size, with the least bytes and operations that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.timing import chain_us, once_us, queued_us
from quire_worker.model.arch_spec import ArchSpec
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.profile.cost import Cost
from quire_worker.profile.floor import Peak, floor_us

COLD_BYTES = 400 << 20
"""So much is gone through before anything is read again, or CALLS times what a call reads, if that is less: eight times
the L2 cache of an H200, twice where a call reads 4 MB."""
CALLS = 28
"""In a chain, whose own launch takes some 10 us: a third of a microsecond of each call."""
NODE_US = 1.13
"""What a node of a graph takes by itself, as measured on an H200."""


class Bench(NamedTuple):
    """The common parts of cases: a model's shape, its ops, and sizes that suit the device."""

    spec: ArchSpec
    ops: TritonOps
    device: torch.device
    dtype: torch.dtype
    page_size: int

    def random(self, *shape: int) -> Tensor:
        """Return normally distributed numbers, since zeros are computed faster."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def ids(self, *shape: int) -> Tensor:
        """Random tokens, int32."""
        return torch.randint(0, self.spec.vocab_size, shape, dtype=torch.int32, device=self.device)

    def full(self, rows: int, value: float, dtype: torch.dtype = torch.int32) -> Tensor:
        """A column."""
        return torch.full((rows,), value, dtype=dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`run(index)` launches the kernel on one of several copies of its cold inputs, in turn, and returns its result.
    `cost` is the cost of one call."""

    name: str
    run: Callable[[int], Tensor]
    cost: Cost
    launches: int = 1
    """Nodes of a graph that a call becomes."""
    capturable: bool = True
    wanted: float = 0.0
    """Share of the floor; 0: none in particular."""

    def figures(self, peak: Peak | None) -> dict[str, float]:
        """Time the case. Returns the rate that bounds it, its floor, and the time of its graph nodes if that is longer.
        Without a known peak rate, there is no floor."""
        us = self._time_us()
        if peak is None:
            return {"us": us}
        least, nodes = floor_us(self.cost, peak), self.launches * NODE_US
        computes = self.cost.flops / peak.flops_per_s > self.cost.bytes / peak.bytes_per_s
        rate = {"tflop_per_s": self.cost.flops / us / 1e6} if computes else {"gb_per_s": self.cost.bytes / us / 1e3}
        beside = {"nodes_us": nodes} if nodes > least else {}
        return {"us": us, **rate, "floor_us": least, "of_floor": least / us, **beside}

    def _time_us(self) -> float:
        if not torch.cuda.is_available():
            return once_us(self.run)
        return (chain_us if self.capturable else queued_us)(self.run, CALLS)


def copies_of(num_bytes: int) -> int:
    """Return how many copies of this size are needed, so that the first is cold again when its turn comes."""
    return max(2, min(CALLS, -(-COLD_BYTES // max(1, num_bytes))))

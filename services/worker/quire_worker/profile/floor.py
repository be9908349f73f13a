"""The measured peak speeds of devices, and the least time of a call that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire_worker.profile.cost import Cost


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes per second of memory, read and written together, and operations per second of a bf16 GEMM."""

    bytes_per_s: float
    flops_per_s: float


# Measured, not a data sheet's: a copy of 1 GiB, and the largest bf16 products.
PEAKS: Mapping[str, Peak] = {"NVIDIA H200": Peak(4.3e12, 790e12)}


def floor_us(cost: Cost, peak: Peak) -> float:
    """Return the least time of all these calls in microseconds: the time that memory needs or that arithmetic needs,
    whichever is longer."""
    return 1e6 * max(cost.bytes / peak.bytes_per_s, cost.flops / peak.flops_per_s)

"""Measures the time of work on a GPU. Launches are arranged so that the host is not the bottleneck."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_WARM = 2
_HELD_BACK = 16
_SIDE = 8192


def chain_us(run: Callable[[int], object], calls: int, *, replays: int = 6) -> float:
    """Return the microseconds of one call of `run(0)`, `run(1)`, ..., from a captured chain of several calls, which
    share the time of the graph's launch. The result is the median of several replays."""
    for index in range(min(_WARM, calls)):
        run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            run(index)
    graph.replay()
    return sorted(_device_us(graph.replay) for _ in range(replays))[replays // 2] / calls


def queued_us(run: Callable[[int], object], calls: int) -> float:
    """Return the same for calls that no graph can hold. All calls are launched while the device is busy with other
    work."""
    for index in range(min(_WARM, calls)):
        run(index)
    side = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()

    def launch() -> None:
        for index in range(calls):
            run(index)

    def hold_back() -> None:
        # A millisecond or more each.
        for _ in range(_HELD_BACK):
            torch.mm(side, side)

    return _device_us(launch, hold_back) / calls


def once_us(run: Callable[[int], object]) -> float:
    """Return the time of one call on the host's clock, without a GPU. It shows that the call runs, and nothing of its
    speed."""
    begin = time.perf_counter()
    run(0)
    return (time.perf_counter() - begin) * 1e6


def _device_us(launch: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    before()
    begin.record()
    launch()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end) * 1000)

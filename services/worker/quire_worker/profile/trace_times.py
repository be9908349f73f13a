"""Computes times from a trace in Chrome's format, as torch's profiler writes it: by named range, and by kernel.

A kernel belongs to the innermost range in which it was launched. Without kernels, as on a CPU, a range counts its own
time, without the ranges inside it. This module knows nothing of models.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
OUTSIDE = "outside of named ranges"


@dataclass(slots=True)
class Times:
    """A time in microseconds, and the number of calls."""

    us: float = 0.0
    count: int = 0
    kernels: dict[str, Times] = field(default_factory=dict)
    """Within a range, by name."""

    def add_kernel(self, name: str, spent: Times) -> None:
        """Add the time of a kernel, and store it by the kernel's name."""
        self.us += spent.us
        self.count += spent.count
        self.kernels[name] = spent

    def add(self, us: float) -> None:
        """Count one more call, which took `us` microseconds."""
        self.us += us
        self.count += 1


def times_by_range(trace: Mapping[str, Any], prefix: str) -> dict[str, Times]:
    """Return times in microseconds by name of a range, without the prefix: those of the kernels that were launched in
    it, by kernel too. Copies and fills on the device count as kernels. Kernels outside all ranges count as OUTSIDE. If
    the trace has no kernels, these are the ranges' own times."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    ranges = [e for e in events if e.get("cat") == "user_annotation" and str(e.get("name")).startswith(prefix)]
    if not kernels:
        return _own_times(ranges, prefix)
    by_thread = _by_thread(ranges)
    launched = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    found: dict[str, Times] = defaultdict(Times)
    for kernel in kernels:
        launch = launched.get(kernel.get("args", {}).get("correlation"))
        name = OUTSIDE if launch is None else _innermost(by_thread, launch, prefix)
        found[name].add(float(kernel["dur"]))
        found[name].kernels.setdefault(str(kernel["name"]), Times()).add(float(kernel["dur"]))
    return dict(found)


def _by_thread(ranges: Iterable[Mapping[str, Any]]) -> dict[Any, list[Mapping[str, Any]]]:
    """Group the ranges by process and thread, in order of their beginnings."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in ranges:
        by_thread[event.get("pid"), event.get("tid")].append(event)
    for each in by_thread.values():
        each.sort(key=lambda event: event["ts"])
    return by_thread


def _innermost(by_thread: Mapping[Any, list[Mapping[str, Any]]], launch: Mapping[str, Any], prefix: str) -> str:
    """Return the name, without the prefix, of the innermost range of the launch's thread in which it happened; OUTSIDE
    if there is none."""
    ranges = by_thread.get((launch.get("pid"), launch.get("tid")), [])
    at = float(launch["ts"])
    for index in range(bisect_right(ranges, at, key=lambda event: float(event["ts"])) - 1, -1, -1):
        if float(ranges[index]["ts"]) + float(ranges[index]["dur"]) >= at:
            return str(ranges[index]["name"]).removeprefix(prefix)
    return OUTSIDE


def _own_times(ranges: Iterable[Mapping[str, Any]], prefix: str) -> dict[str, Times]:
    """Return, by name of a range, the time spent in it without the ranges inside it."""
    found: dict[str, Times] = defaultdict(Times)
    for events in _by_thread(ranges).values():
        open_ranges: list[tuple[float, str]] = []
        for event in events:
            begin, took, name = float(event["ts"]), float(event["dur"]), str(event["name"]).removeprefix(prefix)
            while open_ranges and open_ranges[-1][0] <= begin:
                open_ranges.pop()
            if open_ranges:
                found[open_ranges[-1][1]].us -= took
            found[name].add(took)
            open_ranges.append((begin + took, name))
    return dict(found)

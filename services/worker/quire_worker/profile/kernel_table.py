"""The table of a profile: the times of a step by name, with the bytes and operations that each name needs, as text and
as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from quire_worker.profile.cost import Cost
from quire_worker.profile.floor import Peak, floor_us
from quire_worker.profile.trace_times import Times


@dataclass(frozen=True, slots=True)
class Row:
    """A part of a step, as means over the profiled steps. `us` and `floor_us` are microseconds per step. 0 means not
    known."""

    name: str
    calls: float
    us: float
    share: float
    """Of the step."""
    gb_per_s: float
    tflop_per_s: float
    floor_us: float
    of_floor: float
    """floor / time: 1 is as fast as the device is."""
    kernels: tuple[str, ...]
    """Names, the longest running first."""


def make_rows(times: Mapping[str, Times], costs: Mapping[str, Cost], steps: int, peak: Peak | None) -> list[Row]:
    """Make a row of the table for each part of a step, the longest first. `times` are of all `steps`, `costs` of one.
    The calls of a part are those of its cost or, without them, the count of its times per step. Without a `peak` the
    floors are 0."""
    total = sum(each.us for each in times.values()) or 1.0
    rows = []
    for name, spent in times.items():
        cost = costs.get(name, Cost())
        us = spent.us / steps
        least = 0.0 if peak is None else floor_us(cost, peak)
        rows.append(
            Row(
                name=name,
                calls=(cost.calls or spent.count / steps),
                us=us,
                share=spent.us / total,
                gb_per_s=cost.bytes / us / 1e3 if us > 0 else 0.0,
                tflop_per_s=cost.flops / us / 1e6 if us > 0 else 0.0,
                floor_us=least,
                of_floor=least / us if us > 0 else 0.0,
                kernels=tuple(sorted(spent.kernels, key=lambda kernel: -spent.kernels[kernel].us)),
            )
        )
    return sorted(rows, key=lambda row: -row.us)


def as_text(rows: list[Row]) -> str:
    """Format the rows as a text table: for each part of the step a line with its times in microseconds, followed by the
    names of its three longest kernels. The last line is the whole step. The floor is the least time that the device
    needs for a part's bytes and operations (see floor.py); "-" if it is not known. The floor of the whole step is the
    sum of the known floors."""
    lines = [_line("part of a step", "calls", "us", "share", "GB/s", "TFLOP/s", "floor us", "of floor")]
    for row in rows:
        rates = f"{row.gb_per_s:.0f}", f"{row.tflop_per_s:.1f}"
        floor = (f"{row.floor_us:.1f}", f"{row.of_floor:.0%}") if row.floor_us else ("-", "-")
        lines.append(_line(row.name, f"{row.calls:.0f}", f"{row.us:.1f}", f"{row.share:.1%}", *rates, *floor))
        lines += [f"    {kernel[:100]}" for kernel in row.kernels[:3]]
    total, least = sum(row.us for row in rows), sum(row.floor_us for row in rows)
    floor = (f"{least:.1f}", f"{least / total:.0%}") if least and total else ("-", "-")
    lines.append(_line("whole step", "", f"{total:.1f}", "", "", "", *floor))
    return "\n".join(lines)


def _line(name: str, *cells: str) -> str:
    return f"{name:32}" + "".join(f"{cell:>10}" for cell in cells)


def as_records(rows: list[Row]) -> list[dict[str, object]]:
    """Return the rows as dicts, for JSON."""
    return [asdict(row) for row in rows]

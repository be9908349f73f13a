"""Draws the grid of `bench.scheduler.delay` as SVG: the share of the ideal throughput over the delay, with a panel for
each number of rows. It knows cells and medians, not how they were measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e", "#97bbf5")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 320, 240, 48, 40, 56
_LEGEND = 150


class Point(NamedTuple):
    """The key of one cell: its line, its panel and its place on the line."""

    rows: int
    step_ms: float
    mode: str
    delay_ms: float


def svg(medians: Mapping[Point, float]) -> str:
    """Draw free-running as full lines and lockstep as dashed ones. Delays stand side by side, not to scale."""
    rows = sorted({point.rows for point in medians})
    steps = sorted({point.step_ms for point in medians})
    delays = sorted({point.delay_ms for point in medians})
    wide = _LEFT + len(rows) * (_WIDTH + _GAP) + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{_TOP + _HEIGHT + 56}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, row_count in enumerate(rows):
        left = _LEFT + number * (_WIDTH + _GAP)
        parts.append(_frame(left, f"{row_count} rows", delays))
        for colour, step_ms in zip(_COLOURS, steps, strict=False):
            for mode, dash in (("free", ""), ("lockstep", ' stroke-dasharray="5 4"')):
                places = [
                    f"{_x(left, index, len(delays)):.1f},{_y(medians[key]):.1f}"
                    for index, delay in enumerate(delays)
                    if (key := Point(row_count, step_ms, mode, delay)) in medians
                ]
                if places:
                    line = " ".join(places)
                    parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
    left = wide - _LEGEND
    for index, (colour, step_ms) in enumerate(zip(_COLOURS, steps, strict=False)):
        parts.append(_text(left, _TOP + 20 * index + 12, f"step of {step_ms:g} ms", fill=colour))
    parts.append(_text(left, _TOP + 20 * len(steps) + 20, "dashed: lockstep"))
    return "\n".join([*parts, "</svg>\n"])


def _frame(left: int, title: str, delays: list[float]) -> str:
    """Title, scales and the lines behind the data."""
    parts = [_text(left, _TOP - 14, f"Share of the ideal throughput, {title}")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        parts.append(f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(_text(left - 6, y + 4, f"{share:g}", anchor="end"))
    for index, delay in enumerate(delays):
        parts.append(_text(_x(left, index, len(delays)), _TOP + _HEIGHT + 18, f"{delay:g}", anchor="middle"))
    parts.append(_text(left + _WIDTH / 2, _TOP + _HEIGHT + 38, "delay each way, ms", anchor="middle"))
    return "\n".join(parts)


def _x(left: int, index: int, count: int) -> float:
    return left + _WIDTH * (index + 0.5) / count


def _y(share: float) -> float:
    return _TOP + _HEIGHT * (1 - min(share, 1.05))


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{text}</text>'

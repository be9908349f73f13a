"""Draws a page of small charts as SVG: the latencies and the throughput of a serving benchmark. It needs no library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from quire.bench.outcome import Outcome

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 240, 60, 34, 30
_POINTS = 300
Points = Sequence[tuple[float, float]]


def serving_charts(outcomes: Sequence[Outcome], begin_s: float, title: str) -> str:
    """Return the text of an SVG with four charts: the cumulative distributions of TTFT, TPOT (of requests with two
    tokens or more) and ITL in ms, and output events per second over time. Failed requests are left out. `begin_s` is
    the start of the load."""
    done = [outcome for outcome in outcomes if outcome.ok]
    charts = [
        _chart("time to first token", "ms", "share of requests", _distribution([o.ttft_s * 1000 for o in done])),
        _chart(
            "time per output token",
            "ms",
            "share of requests",
            _distribution([o.tpot_s * 1000 for o in done if o.output_tokens > 1]),
        ),
        _chart("inter-token latency", "ms", "share of gaps", _distribution([g * 1000 for o in done for g in o.gaps_s])),
        _chart("output", "s", "events per second", _rate(done, begin_s)),
    ]
    width, height = 2 * _WIDTH, 2 * _HEIGHT + 30
    placed = [
        f'<g transform="translate({(number % 2) * _WIDTH},{(number // 2) * _HEIGHT + 30})">{chart}</g>'
        for number, chart in enumerate(charts)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="20" font-size="14">{escape(title)}</text>{"".join(placed)}</svg>\n'
    )


def _distribution(values: Sequence[float]) -> Points:
    """Return points of the cumulative distribution: for each x, the share of values that are at most x. Of many values,
    a few hundred are taken. Empty without values."""
    ordered = sorted(values)
    step = max(1, len(ordered) // _POINTS)
    return [(ordered[i], (i + 1) / len(ordered)) for i in [*range(0, len(ordered), step), len(ordered) - 1] if ordered]


def _rate(done: Sequence[Outcome], begin_s: float) -> Points:
    """Return points (seconds since `begin_s`, events per second) in some 60 intervals, each at its middle. An event may
    carry several tokens and counts once. Empty without events."""
    times = []
    for outcome in done:
        at_s = outcome.first_s - begin_s
        times.append(at_s)
        for gap_s in outcome.gaps_s:
            at_s += gap_s
            times.append(at_s)
    if not times:
        return []
    width_s = max(max(times) / 60, 1e-3)
    counts = [0] * (int(max(times) / width_s) + 1)
    for time_s in times:
        counts[int(time_s / width_s)] += 1
    return [((number + 0.5) * width_s, count / width_s) for number, count in enumerate(counts)]


def _chart(title: str, x_name: str, y_name: str, points: Points) -> str:
    """Return the SVG of one line chart, `_WIDTH` by `_HEIGHT`. Both axes begin at 0 and end at the greatest value (1 if
    that is 0 or there are no points), with marks at 0, the half and the whole."""
    most_x, most_y = (max((point[axis] for point in points), default=0.0) or 1.0 for axis in (0, 1))
    plot_width, plot_height = _WIDTH - _LEFT - 20, _HEIGHT - _BOTTOM - _TOP

    def place(x: float, y: float) -> str:
        return f"{_LEFT + x / most_x * plot_width:.1f},{_TOP + (1 - y / most_y) * plot_height:.1f}"

    parts = [f'<text x="{_LEFT}" y="{_TOP - 10}" font-weight="bold">{escape(title)}</text>']
    for fraction in (0.0, 0.5, 1.0):
        x, y = _LEFT + fraction * plot_width, _TOP + (1 - fraction) * plot_height
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + plot_width}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_short(fraction * most_y)}</text>')
        parts.append(f'<text x="{x}" y="{_HEIGHT - 18}" text-anchor="middle">{_short(fraction * most_x)}</text>')
    parts.append(f'<text x="{_LEFT + plot_width / 2}" y="{_HEIGHT - 5}" text-anchor="middle">{escape(x_name)}</text>')
    parts.append(f'<text x="{_WIDTH - 20}" y="{_TOP - 10}" text-anchor="end" fill="#666">{escape(y_name)}</text>')
    line = " ".join(place(x, y) for x, y in points)
    parts.append(f'<polyline fill="none" stroke="#1f6feb" stroke-width="1.5" points="{line}"/>')
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"

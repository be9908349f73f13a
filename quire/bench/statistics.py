"""Means and percentiles of a list, as numpy would give them, without numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """By linear interpolation; `ordered` is sorted. 0 of nothing."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """mean, median, std, and p<percent> for each; all 0 of nothing."""
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered) if ordered else 0.0
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)) if ordered else 0.0
    return {
        "mean": mean,
        "median": percentile(ordered, 50),
        "std": spread,
        **{f"p{percent:g}": percentile(ordered, percent) for percent in percents},
    }

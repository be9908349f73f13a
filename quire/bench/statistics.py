"""Means and percentiles of a list, with the results of numpy, but without numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the percentile (`percent` from 0 to 100) of values in ascending order, by linear interpolation; 0 if there
    are none."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """Return mean, median, std (of all values, divided by their number), and p<percent> for each percentile; all are 0
    if there are no values."""
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered) if ordered else 0.0
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)) if ordered else 0.0
    return {
        "mean": mean,
        "median": percentile(ordered, 50),
        "std": spread,
        **{f"p{percent:g}": percentile(ordered, percent) for percent in percents},
    }

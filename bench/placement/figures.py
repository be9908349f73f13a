"""The results of a simulated run: cache hits, latencies, and the share of requests served within their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.placement.fleet import Outcome

# A request is good if its first token comes so soon, and the others so soon one after the other.
SLO_TTFT_S, SLO_ITL_S = 2.0, 0.05


@dataclass(frozen=True)
class Figures:
    """The figures of one run, in ms. `apart` is the share of requests that another replica prefilled. `second` is the
    time of these requests from the first token to the second; None if there were none."""

    hit_rate: float
    ttft: tuple[float, float]
    itl: tuple[float, float]
    good: float
    goodput: float
    decision: tuple[float, float]
    busy: float
    apart: float = 0.0
    second: tuple[float, float] | None = None


def figures(outcome: Outcome) -> Figures:
    runs = outcome.runs
    ttft = np.array([run.first_s - run.arrived_s for run in runs])
    tokens = np.array([run.request.output_tokens for run in runs])
    mean_itl = np.array([run.done_s - run.first_s for run in runs]) / np.maximum(tokens - 1, 1)
    good = (ttft <= SLO_TTFT_S) & (mean_itl <= SLO_ITL_S)
    total = sum(run.request.input_tokens for run in runs)
    return Figures(
        hit_rate=sum(run.cached_tokens for run in runs) / total,
        ttft=_percentiles(ttft * 1e3),
        itl=_weighted(outcome.gaps),
        good=float(good.mean()),
        goodput=float(good.sum()) / outcome.makespan_s,
        decision=_percentiles(np.array(outcome.decisions_s) * 1e3),
        busy=outcome.busy,
        apart=outcome.apart / len(runs),
        second=_percentiles(np.array(outcome.seconds) * 1e3) if outcome.seconds else None,
    )


def _percentiles(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, float]:
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return p50, p99


def _weighted(gaps: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return percentiles of the time between two tokens, with each token counted once."""
    if not gaps:
        return 0.0, 0.0
    times, counts = np.array([gap[0] for gap in gaps]), np.array([gap[1] for gap in gaps])
    by_time = np.argsort(times)
    share = np.cumsum(counts[by_time]) / counts.sum()
    p50, p99 = (float(times[by_time][np.searchsorted(share, level)]) * 1e3 for level in (0.5, 0.99))
    return p50, p99

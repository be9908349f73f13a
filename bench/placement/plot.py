"""Draws the pictures of `bench.placement.simulate` as SVG. It needs matplotlib, which no other part of this benchmark
needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

    from bench.placement.figures import Figures
    from bench.placement.fleet import Outcome

_COLOURS = {"kv_aware": "#4269d0", "least_loaded": "#efb118", "round_robin": "#ff725c", "session": "#6cc5b0"}


def plot(
    outcomes: Mapping[str, Outcome],
    results: Mapping[str, Mapping[str, Figures]],
    oracle: float,
    title: str,
    folder: str,
) -> None:
    """Draw `simulate.svg`: TTFT of every request, hit rates, and the effect of load, for the simulations that ran."""
    mpl.rcParams.update({"svg.hashsalt": "quire", "svg.fonttype": "none", "font.size": 9})
    panels = [_ttft, _hits]
    if results["load"]:
        panels.append(_loads)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4), layout="constrained")
    for panel, axis in zip(panels, axes, strict=True):
        panel(axis, outcomes, results, oracle)
    figure.suptitle(title)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    # Without a date, the same figures make the same file.
    figure.savefig(target / "simulate.svg", metadata={"Date": None})
    plt.close(figure)


def _ttft(axis: Axes, outcomes: Mapping[str, Outcome], results: object, oracle: float) -> None:
    for policy, outcome in outcomes.items():
        times = np.sort([run.first_s - run.arrived_s for run in outcome.runs])
        places = np.unique(np.linspace(0, len(times) - 1, 200).astype(int))
        axis.plot(times[places], (places + 1) / len(times), label=policy, color=_COLOURS.get(policy))
    axis.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests")
    axis.legend(frameon=False)


def _hits(axis: Axes, outcomes: object, results: Mapping[str, Mapping[str, Figures]], oracle: float) -> None:
    found = results["policy"]
    axis.bar(list(found), [one.hit_rate for one in found.values()], color=[_COLOURS.get(name) for name in found])
    axis.axhline(oracle, color="grey", linestyle="--", linewidth=1)
    axis.text(len(found) - 0.5, oracle, "one cache for all", ha="right", va="bottom", color="grey")
    axis.set(ylabel="prompt tokens from cache", ylim=(0, max(oracle * 1.15, 0.05)))


def _loads(axis: Axes, outcomes: object, results: Mapping[str, Mapping[str, Figures]], oracle: float) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for key, found in results["load"].items():
        policy, load = key.split()
        lines.setdefault(policy, []).append((float(load), found.goodput))
    for policy, points in lines.items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", label=policy, color=_COLOURS.get(policy))
    axis.set(xlabel="arrivals, part of capacity", ylabel="requests/s within the SLO")
    axis.legend(frameon=False)

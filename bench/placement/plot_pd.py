"""Draws the picture of `bench.placement.simulate_pd` as SVG. It needs matplotlib, which no other part of this benchmark
needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.axes import Axes

    from bench.placement.figures import Figures

    Results = Mapping[str, Mapping[str, Figures]]

_COLOURS = {"kv_aware": "#4269d0", "least_loaded": "#efb118", "round_robin": "#ff725c", "session": "#6cc5b0"}


def plot(results: Results, title: str, folder: str) -> None:
    """Draw `simulate_pd.svg`: first tokens, later tokens and goodput by ratio, and the effect of bandwidth."""
    mpl.rcParams.update({"svg.hashsalt": "quire", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(1, 4, figsize=(16.8, 3.4), layout="constrained")
    _by_ratio(axes[0], results, lambda found: found.ttft[1], "time to first token, p99, ms", log=True)
    _by_ratio(axes[1], results, lambda found: found.itl[1], "between two tokens, p99, ms", log=True)
    _by_ratio(axes[2], results, lambda found: found.goodput, "requests/s within the SLO", log=False)
    _bandwidths(axes[3], results["bandwidth"])
    figure.suptitle(title)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    # Without a date, the same figures make the same file.
    figure.savefig(target / "simulate_pd.svg", metadata={"Date": None})
    plt.close(figure)


def _by_ratio(axis: Axes, results: Results, value: Callable[[Figures], float], label: str, *, log: bool) -> None:
    ratios = list(dict.fromkeys(key.split()[1] for key in results["decided"]))
    for kind, style in ("decided", "-"), ("always", ":"):
        lines: dict[str, list[tuple[int, float]]] = {}
        for key, found in results[kind].items():
            policy, ratio = key.split()
            lines.setdefault(policy, []).append((ratios.index(ratio), value(found)))
        for policy, points in lines.items():
            name = f"{policy}, {kind}"
            axis.plot(*zip(*points, strict=True), style, marker="o", label=name, color=_COLOURS.get(policy))
    axis.set(xticks=np.arange(len(ratios)), xticklabels=ratios, xlabel="prefill : decode replicas", ylabel=label)
    if log:
        axis.set_yscale("log")
    axis.legend(frameon=False, fontsize=7)


def _bandwidths(axis: Axes, results: Mapping[str, Figures]) -> None:
    places = np.arange(len(results))
    axis.bar(
        places, [found.apart for found in results.values()], 0.6, color="#97bbf5", label="part prefilled elsewhere"
    )
    axis.plot(places, [found.good for found in results.values()], marker="o", color="#4269d0", label="within the SLO")
    axis.set(xticks=places, xticklabels=list(results), xlabel="GB/s into a decode side", ylim=(0, 1.02))
    axis.legend(frameon=False, fontsize=7)

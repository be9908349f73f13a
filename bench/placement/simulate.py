"""`python -m bench.placement.simulate`: runs placement policies on a trace, over simulated replicas, in virtual time.

The trace is that of `--trace` or QUIRE_TRACE; without one, the program makes up a trace of the same shape. The capacity
is the throughput of the replicas when all requests arrive at once, and arrivals are scaled to `--load` of it. TTFT and
ITL are those of the simulated engines (see bench/placement/replica.py). The CPU time of decisions is measured on this
machine. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.placement.figures import Figures, figures
from bench.placement.fleet import Setup, simulate
from bench.placement.replica import Speed
from bench.placement.trace import TraceRequest, load_trace, make_trace, oracle_hits, scaled
from quire_common.serving.settled import settle
from quire_router.placement.registry import PLACEMENTS, Weights

if TYPE_CHECKING:
    pass

POLICIES = ("kv_aware", "least_loaded", "round_robin")


HEAD = (
    "| {:24} | hit rate | of oracle | TTFT p50 / p99 ms | ITL p50 / p99 ms | within SLO | good req/s | "
    "decision p50 / p99 ms | busy |"
)
RULE = "|" + "---|" * 9


def row(name: str, found: Figures, oracle: float) -> str:
    return (
        f"| {name:24} | {found.hit_rate:.3f} | {found.hit_rate / oracle:.3f} | {found.ttft[0]:.0f} / "
        f"{found.ttft[1]:.0f} | {found.itl[0]:.1f} / {found.itl[1]:.1f} | {found.good:.3f} | {found.goodput:.1f} | "
        f"{found.decision[0]:.3f} / {found.decision[1]:.3f} | {found.busy:.2f} |"
    )


def main() -> int:
    options = _options()
    speed = Speed(
        prefill_tokens_per_s=options.prefill_rate, chunk=options.chunk, pages=options.cache_tokens // Speed.page
    )
    weights = Weights(cache=options.cache_weight)
    setup = Setup(replicas=options.replicas, speed=speed, bandwidth=options.bandwidth, weights=weights)
    requests, origin = load_requests(options, speed.page)
    settle()  # as a router does that is ready: the trace is none of what it has to look through
    tokens = sum(request.input_tokens for request in requests)
    print(f"{len(requests):,} requests, {tokens / 1e6:.0f} M prompt tokens, {origin}")
    full = simulate(scaled(requests, 1.0), setup)
    # Requests per second and replica.
    capacity = len(requests) / full.makespan_s / options.replicas
    print(f"capacity of {options.replicas} replicas: {capacity * options.replicas:.1f} requests/s\n")

    def at(load: float, replicas: int) -> list[TraceRequest]:
        return scaled(requests, len(requests) / (load * capacity * replicas))

    failed = []
    results: dict[str, dict[str, Figures]] = {"policy": {}, "load": {}}
    arrivals = at(options.load, options.replicas)
    oracle = oracle_hits(arrivals, speed.page, options.replicas * speed.pages)
    title = f"{options.replicas} replicas, {options.load:.0%} of capacity"
    print(HEAD.format(title) + "\n" + RULE)
    outcomes = {}
    for policy in options.policies:
        outcomes[policy] = simulate(arrivals, replace(setup, policy=policy))
        results["policy"][policy] = figures(outcomes[policy])
        print(row(policy, results["policy"][policy], oracle), flush=True)
    print(f"\noracle, one cache of {options.replicas * speed.pages * speed.page / 1e6:.0f} M tokens: {oracle:.3f}\n")
    failed += _missed(results["policy"], oracle)
    for load in options.loads:
        print(HEAD.format(f"{options.replicas} replicas, {load:.0%}") + "\n" + RULE)
        for policy in options.policies:
            found = figures(simulate(at(load, options.replicas), replace(setup, policy=policy)))
            results["load"][f"{policy} {load}"] = found
            print(row(policy, found, oracle), flush=True)
        print()
    if options.fleets:
        print(HEAD.format("kv_aware, replicas") + "\n" + RULE)
        for count in options.fleets:
            scaled_up = at(options.load, count)
            best = oracle_hits(scaled_up, speed.page, count * speed.pages)
            found = figures(simulate(scaled_up, replace(setup, replicas=count)))
            print(row(str(count), found, best), flush=True)
            if count >= 1000 and found.decision[1] >= 1.0:
                failed.append(f"a decision among {count} replicas takes {found.decision[1]:.2f} ms at p99")
    if options.plots:
        from bench.placement.plot import plot

        plot(outcomes, results, oracle, f"{len(requests):,} requests {origin}, {title}", options.plots)
    for line in failed:
        print(f"MISSED: {line}")
    return int(bool(failed))


def _missed(found: dict[str, Figures], oracle: float) -> list[str]:
    """Return the targets of kv_aware that were missed."""
    missed = []
    ours = found.get("kv_aware")
    if ours is not None:
        if ours.hit_rate < 0.9 * oracle:
            missed.append(f"kv_aware hits {ours.hit_rate / oracle:.3f} of the oracle")
        others = [name for name in ("round_robin", "least_loaded") if name in found]
        missed += [f"p99 TTFT is no better than {name}'s" for name in others if ours.ttft[1] >= found[name].ttft[1]]
    return missed


def load_requests(options: argparse.Namespace, page: int) -> tuple[list[TraceRequest], str]:
    """Return the trace that the options name, and its origin."""
    path = options.trace or os.environ.get("QUIRE_TRACE", "")
    if path and Path(path).is_file():
        return load_trace(Path(path), page, options.requests), f"from {Path(path).name}"
    return make_trace(options.requests or 12_000, page), "made up in the shape of a chat service's"


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the trace and the fleet."""
    parser.add_argument("--trace", default="", help="Mooncake's JSONL; default: QUIRE_TRACE, else a made-up one")
    parser.add_argument("--requests", type=int, default=0, help="the first so many; 0: all")
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--load", type=float, default=0.7, help="arrivals as a part of capacity")
    parser.add_argument("--prefill-rate", type=float, default=Speed.prefill_tokens_per_s)
    parser.add_argument("--chunk", type=int, default=Speed.chunk)
    parser.add_argument("--cache-tokens", type=int, default=3_000_000, help="pages of each replica, in tokens")
    parser.add_argument("--bandwidth", type=float, default=Setup.bandwidth, help="bytes per second into a decode side")
    parser.add_argument("--plots", default="", help="folder for SVG plots")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_trace_options(parser)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=tuple(PLACEMENTS))
    parser.add_argument("--loads", nargs="*", type=float, default=[], help="other loads, for the plot of goodput")
    parser.add_argument("--fleets", nargs="*", type=int, default=[1, 4, 100, 1000], help="numbers of replicas")
    parser.add_argument("--cache-weight", type=float, default=Weights().cache)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

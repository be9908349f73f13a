"""`python -m bench.placement.simulate_pd`: simulates prefill and decode replicas in virtual time, with several ratios,
bandwidths and policies.

The replicas are those of `bench.placement.simulate`, but some prefill and the others decode. In `decided`, the router
itself decides which requests another replica prefills. This is compared with replicas that all do both (`together`),
and with sending every prompt to a prefill replica (`always`). Arrivals are `--load` of the throughput of all replicas
together. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from bench.placement.figures import Figures, figures
from bench.placement.fleet import Setup, simulate
from bench.placement.replica import Speed
from bench.placement.simulate import add_trace_options, load_requests
from bench.placement.trace import scaled
from quire_router.placement.disaggregation import SplitOptions
from quire_router.placement.registry import PLACEMENTS

HEAD = (
    "| {:30} | apart | hit rate | TTFT p50 / p99 ms | ITL p50 / p99 ms | 2nd token p50 / p99 ms | within SLO "
    "| good req/s | decision p99 ms | busy |"
)
RULE = "|" + "---|" * 10
# No prompt is too short, and rates are not looked at.
ALWAYS = SplitOptions(least_tokens=1, threshold_tokens=1, by_rates=False)


def row(name: str, found: Figures) -> str:
    second = "-" if found.second is None else f"{found.second[0]:.1f} / {found.second[1]:.1f}"
    return (
        f"| {name:30} | {found.apart:.2f} | {found.hit_rate:.3f} | {found.ttft[0]:.0f} / {found.ttft[1]:.0f} | "
        f"{found.itl[0]:.1f} / {found.itl[1]:.1f} | {second} | {found.good:.3f} | "
        f"{found.goodput:.1f} | {found.decision[1]:.3f} | {found.busy:.2f} |"
    )


def main() -> int:
    options = _options()
    speed = Speed(
        prefill_tokens_per_s=options.prefill_rate, chunk=options.chunk, pages=options.cache_tokens // Speed.page
    )
    split = SplitOptions(least_tokens=options.least_tokens, interference=options.interference)
    setup = Setup(replicas=options.replicas, speed=speed, bandwidth=options.bandwidth, split=split)
    requests, origin = load_requests(options, speed.page)
    full = simulate(scaled(requests, 1.0), setup)
    arrivals = scaled(requests, full.makespan_s / options.load)
    print(f"{len(requests):,} requests {origin}; {options.replicas} replicas, {options.load:.0%} of their capacity")

    def run(name: str, setup: Setup) -> Figures:
        found = figures(simulate(arrivals, setup))
        print(row(name, found), flush=True)
        return found

    ratios = {ratio: int(ratio.partition(":")[0]) for ratio in options.ratios}
    results: dict[str, dict[str, Figures]] = {"decided": {}, "always": {}, "bandwidth": {}}
    for policy in options.policies:
        print(f"\n{HEAD.format(policy + ', prefill : decode')}\n{RULE}")
        results["decided"][f"{policy} together"] = run("together", replace(setup, policy=policy))
        for ratio, prefill in ratios.items():
            apart = replace(setup, policy=policy, prefill=prefill)
            results["decided"][f"{policy} {ratio}"] = run(f"{ratio} decided", apart)
            always = replace(apart, split=ALWAYS)
            results["always"][f"{policy} {ratio}"] = run(f"{ratio} always", always)
    middle = list(ratios.values())[len(ratios) // 2]
    print(f"\n{HEAD.format(f'{middle} prefill, GB/s per decode side')}\n{RULE}")
    for bandwidth in options.bandwidths:
        apart = replace(setup, policy=options.policies[0], prefill=middle, bandwidth=bandwidth * 1e9)
        results["bandwidth"][f"{bandwidth:g}"] = run(f"{bandwidth:g}", apart)
    if options.per_host:
        print(f"\n{HEAD.format(f'{middle} prefill, {options.per_host} per host, GB/s')}\n{RULE}")
    for bandwidth in options.bandwidths if options.per_host else ():
        apart = replace(setup, policy=options.policies[0], prefill=middle, bandwidth=bandwidth * 1e9)
        near = replace(apart, per_host=options.per_host, near_bandwidth=options.near_bandwidth * 1e9)
        run(f"{bandwidth:g}, hosts unknown", replace(near, tells_hosts=False))
        run(f"{bandwidth:g}, hosts told", near)
    if options.plots:
        from bench.placement.plot_pd import plot

        title = f"{len(requests):,} requests {origin}, {options.replicas} replicas, {options.load:.0%} of capacity"
        plot(results, title, options.plots)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_trace_options(parser)
    parser.add_argument("--policies", nargs="+", default=["kv_aware", "least_loaded"], choices=tuple(PLACEMENTS))
    parser.add_argument("--ratios", nargs="+", default=["2:14", "4:12", "8:8", "12:4"], help="prefill to decode")
    parser.add_argument(
        "--bandwidths",
        nargs="*",
        type=float,
        default=[0.5, 1, 2, 5, 25],
        help="GB/s, with the middle one of the ratios",
    )
    parser.add_argument("--per-host", type=int, default=0, help="replicas that share a host, for a table of its own")
    parser.add_argument("--near-bandwidth", type=float, default=200, help="GB/s within a host")
    parser.add_argument("--least-tokens", type=int, default=SplitOptions().least_tokens)
    parser.add_argument("--interference", type=float, default=SplitOptions().interference)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

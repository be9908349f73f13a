"""The report of a serving benchmark, with vLLM's names and units, so that results of both can be compared."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.decode_window import decode_window
from quire.bench.outcome import Outcome
from quire.bench.statistics import summary

# Metric: (headline, unit's name in the table).
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "decode_tpot": "Time per Output Token while All Decode",
}
# Not every server tells what it takes to know them.
_MAY_BE_UNKNOWN = ("decode_tpot",)
_WIDTH = 50


@dataclass(frozen=True)
class ReportOptions:
    """`goodput` has limits in milliseconds by metric. A request is good if it keeps all limits."""

    metrics: Sequence[str] = ("ttft", "tpot", "itl")
    percents: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] | None = None
    detailed: bool = False


def make_report(outcomes: Sequence[Outcome], begin_s: float, options: ReportOptions) -> dict[str, Any]:
    """Return the report with vLLM's names. Throughputs are over the time from `begin_s` to the last token; latencies
    have mean, median, std and percentiles in milliseconds. Failed requests are left out of these; they are counted,
    with the five most frequent causes (cut to 300 characters). TPOT has only requests of at least two output tokens. If
    limits are given, goodput is the number of requests per second that keep them all. `decode_tpot` is left out if it
    is not known. With `detailed`, lists have one entry per request, failed ones included."""
    done = [outcome for outcome in outcomes if outcome.ok]
    duration_s = max((outcome.last_s for outcome in done), default=begin_s) - begin_s
    output, total_input = sum(o.output_tokens for o in done), sum(o.prompt_tokens for o in done)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    window = decode_window(done)
    values = {
        "ttft": [o.ttft_s for o in done],
        "tpot": [o.tpot_s for o in done if o.output_tokens > 1],
        "itl": [gap for o in done for gap in o.gaps_s],
        "e2el": [o.latency_s for o in done],
        "decode_tpot": window.per_token_s,
    }
    report: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": output,
        "request_throughput": len(done) * per_s,
        "output_throughput": output * per_s,
        "total_token_throughput": (output + total_input) * per_s,
        "max_output_tokens_per_s": _peak_rate(done, begin_s),
        "max_concurrent_requests": _peak_concurrency(done),
        "decode_window_s": window.seconds,
        "decode_window_concurrency": window.concurrency,
    }
    if options.goodput:
        report["request_goodput"] = sum(_good(outcome, options.goodput) for outcome in done) * per_s
    for name in METRICS:
        if name in _MAY_BE_UNKNOWN and not values[name]:
            continue
        for statistic, value in summary(values[name], options.percents).items():
            report[f"{statistic}_{name}_ms"] = value * 1000
    if report["failed"]:
        failures = Counter(outcome.error for outcome in outcomes if outcome.error)
        report["failures"] = {cause[:300]: count for cause, count in failures.most_common(5)}
    if options.detailed:
        report |= {
            "input_lens": [o.prompt_tokens for o in outcomes],
            "output_lens": [o.output_tokens for o in outcomes],
            "start_times": [o.sent_s - begin_s for o in outcomes],
            "ttfts": [o.ttft_s if o.ok else 0.0 for o in outcomes],
            "itls": [o.gaps_s for o in outcomes],
            "errors": [o.error for o in outcomes],
        }
    return report


def render_report(report: Mapping[str, Any], options: ReportOptions) -> str:
    """Return the report as the text of vLLM's table, with mean, median and percentiles of `options.metrics`, and a line
    for each cause of failures. Counts that the report lacks, or that are no numbers, are left out; a latency that it
    lacks is `unknown`."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    rows: list[tuple[str, str, str]] = [
        ("Successful requests:", "completed", "d"),
        ("Failed requests:", "failed", "d"),
        ("Maximum request concurrency:", "max_concurrency", "d"),
        ("Request rate configured (RPS):", "request_rate", ".2f"),
        ("Benchmark duration (s):", "duration", ".2f"),
        ("Total input tokens:", "total_input_tokens", "d"),
        ("Total generated tokens:", "total_output_tokens", "d"),
        ("Request throughput (req/s):", "request_throughput", ".2f"),
        ("Request goodput (req/s):", "request_goodput", ".2f"),
        ("Output token throughput (tok/s):", "output_throughput", ".2f"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ".2f"),
        ("Peak concurrent requests:", "max_concurrent_requests", "d"),
        ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
    ]
    for label, name, form in rows:
        value = report.get(name)
        if isinstance(value, int | float):
            lines.append(f"{label:<40} {value:<{_WIDTH - 41}{form}}".rstrip())
    for name in options.metrics:
        lines.append(f"{METRICS[name]}".center(_WIDTH, "-"))
        for statistic in ("mean", "median", *(f"p{percent:g}" for percent in options.percents)):
            label = f"{statistic if statistic.startswith('p') else statistic.capitalize()} {name.upper()} (ms):"
            label = label[0].upper() + label[1:]
            value = report.get(f"{statistic}_{name}_ms")
            lines.append(f"{label:<40} {'unknown' if value is None else f'{value:.2f}'}")
    lines.append("=" * _WIDTH)
    for cause, count in report.get("failures", {}).items():
        lines.append(f"{count} failed: {cause}")
    return "\n".join(lines)


def _good(outcome: Outcome, bounds: Mapping[str, float]) -> bool:
    """Whether a request kept all limits, which are in milliseconds by metric."""
    measured = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2el": outcome.latency_s}
    return all(measured[name] * 1000 <= bound for name, bound in bounds.items())


def _peak_rate(done: Sequence[Outcome], begin_s: float) -> float:
    """Return the greatest number of output tokens in one whole second since `begin_s`. The tokens of a request are
    spread evenly over its events."""
    seconds: Counter[int] = Counter()
    for outcome in done:
        # Events are stamped; where one carried several tokens, they are counted evenly over the events.
        weight = outcome.output_tokens / max(outcome.frames, 1)
        at_s = outcome.first_s
        seconds[int(at_s - begin_s)] += weight  # type: ignore[assignment]  # a Counter counts fractions just as well
        for gap_s in outcome.gaps_s:
            at_s += gap_s
            seconds[int(at_s - begin_s)] += weight  # type: ignore[assignment]  # as above
    return max(seconds.values(), default=0.0)


def _peak_concurrency(done: Sequence[Outcome]) -> int:
    """Return the greatest number of requests that were under way at once, each from its sending to its last event."""
    running: list[float] = []
    peak = 0
    for outcome in sorted(done, key=lambda o: o.sent_s):
        while running and running[0] <= outcome.sent_s:
            heapq.heappop(running)
        heapq.heappush(running, outcome.last_s)
        peak = max(peak, len(running))
    return peak

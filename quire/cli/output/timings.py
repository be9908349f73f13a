"""The picture of where a request's time went: a row per service and phase, with its share as a bar."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.output.terminal import bar, paint, table
from quire.outputs import HopTiming

# A hop's own account of the whole request holds all other rows: it would be a bar that says nothing.
_WHOLE = "total"
_ORDER = (
    *("router", "tokenizer", "prefill scheduler", "prefill worker", "prefill kvstore"),
    *("transfer", "scheduler", "worker", "kvstore"),
)


def timing_table(timings: Sequence[HopTiming], total_s: float) -> str:
    """Return the table of a request's phases, ordered by service: count, ms, ms each, and share of `total_s`, the
    request's whole time as its client saw it. Phases of different services may overlap. A hop's total is left out;
    without phases, a sentence says so."""
    rank = {service: i for i, service in enumerate(_ORDER)}
    rows, last = [], ""
    phases = [timing for timing in timings if timing.phase != _WHOLE]
    for timing in sorted(phases, key=lambda t: rank.get(t.service, len(rank))):
        ms = timing.us / 1000
        share = ms / 1000 / total_s if total_s > 0 else 0.0
        service = timing.service if timing.service != last else ""
        last = timing.service
        each = f"{ms / timing.count:.2f}" if timing.count else ""
        rows.append([service, timing.phase, str(timing.count), f"{ms:.2f}", each, f"{share:.1%}", bar(share)])
    if not rows:
        return "(the router gave no timings)"
    text = table(["hop", "phase", "count", "ms", "ms each", "share", ""], rows, right=(2, 3, 4, 5))
    header, _, body = text.partition("\n")
    return f"{paint(header, 'dim')}\n{body}"

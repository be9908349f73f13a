"""Places the timings of a request on its time line: when each phase began, and how long it took.

Services report how long a phase took, but not when it began. So a phase is shown from the earliest moment at which it
can begin. Phases of several steps, such as the decode steps, are shown as one bar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quire_router.sequences.delta import HopTiming

# Each of these phases begins when the one before it ends.
_FIRST = (("router", "parse"), ("router", "tokenize"), ("router", "place"))
# Phases that begin with the first token. All others begin when the request has been placed.
_AFTER_FIRST_TOKEN = (("worker", "decode"), ("tokenizer", "detokenize"), ("router", "migrate"))
_ENCODE, _QUEUE, _PREFILL, _TOTAL = (
    ("tokenizer", "encode"),
    ("scheduler", "queue"),
    ("worker", "prefill"),
    ("router", "total"),
)


@dataclass(frozen=True, slots=True)
class Hop:
    """One bar of the waterfall. `instance` is empty if the instance is not known. `start_ms` counts from the request's
    arrival, and `count` is the number of operations that took `ms` together."""

    service: str
    phase: str
    instance: str
    start_ms: float
    ms: float
    count: int


def waterfall(timings: Sequence[HopTiming], first_token_ms: float, total_ms: float) -> list[Hop]:
    """Return a bar for each timing but the total, in the order in which the bars begin. The router's phases follow each
    other. Encoding begins with the router's tokenizing; the prefill begins after placement and the queue; decoding,
    detokenizing and migrations begin with the first token; all other phases begin after placement. `first_token_ms` is
    0 if there was no token; then the end of the prefill counts. No bar ends after `total_ms`."""
    starts: dict[tuple[str, str], float] = {}
    placed_ms = 0.0
    for key in _FIRST:
        starts[key] = placed_ms
        placed_ms += _sum_ms(timings, key)
    starts[_ENCODE] = starts[_FIRST[1]]
    starts[_PREFILL] = placed_ms + _sum_ms(timings, _QUEUE)
    decoding_ms = first_token_ms or starts[_PREFILL] + _sum_ms(timings, _PREFILL)
    starts |= dict.fromkeys(_AFTER_FIRST_TOKEN, decoding_ms)
    hops = []
    for timing in timings:
        key = timing.service, timing.phase
        if key != _TOTAL:
            start_ms = min(starts.get(key, placed_ms), total_ms)
            ms = min(timing.us / 1000, total_ms - start_ms)
            hops.append(Hop(timing.service, timing.phase, timing.instance, start_ms, ms, timing.count))
    return sorted(hops, key=lambda hop: hop.start_ms)


def unfinished(timings: Sequence[HopTiming], first_token_ms: float, now_ms: float, instance: str) -> list[Hop]:
    """Return the bars of a request that still runs: the `timings` so far (the router's own phases and the encoding),
    the wait for the first token, and the decoding until now. The replica `instance` has reported no timings yet,
    because it reports them at the end."""
    hops = waterfall(timings, first_token_ms, now_ms)
    placed_ms = min(now_ms, sum(_sum_ms(timings, key) for key in _FIRST))
    hops.append(Hop("scheduler", "to first token", instance, placed_ms, (first_token_ms or now_ms) - placed_ms, 1))
    if first_token_ms:
        hops.append(Hop("worker", "decode", instance, first_token_ms, now_ms - first_token_ms, 1))
    return hops


def _sum_ms(timings: Iterable[HopTiming], key: tuple[str, str]) -> float:
    return sum(timing.us for timing in timings if (timing.service, timing.phase) == key) / 1000

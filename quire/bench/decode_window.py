"""Measures decoding alone: the time per token while the greatest number of requests decode and none waits for its first
token.

TPOT is close to what a user sees. But TPOT also covers steps that compute prompts of other requests, and the end of a
load, when few requests are left. To see only the engine's decode steps, this module leaves out both. An event may carry
several tokens. So the measurement needs a server that reports their number (`return_token_ids`), or one that sends an
event per token. For other servers there is no result.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from quire.bench.outcome import Outcome

# Less than any event takes: sums of gaps differ from stamps by rounding.
_ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class DecodeWindow:
    """The window, which may have several spans of time. `concurrency` requests decode in it, for `seconds` in all; both
    are 0 if there is no such time. `per_token_s` has the seconds per token of each request whose tokens per event are
    known and that has two events at different times in one of the spans."""

    concurrency: int
    seconds: float
    per_token_s: Sequence[float]


def decode_window(done: Sequence[Outcome]) -> DecodeWindow:
    """Find the window in which the most requests decode while none waits for its first token, and measure the seconds
    per token in it. `done` are the requests that have an answer."""
    concurrency, spans = _fullest(done)
    found = (_per_token_s(outcome, spans) for outcome in done)
    return DecodeWindow(concurrency, sum(end - begin for begin, end in spans), [each for each in found if each])


def _fullest(done: Sequence[Outcome]) -> tuple[int, list[tuple[float, float]]]:
    """Return the greatest number of requests that decode at once while none waits for its first token, and the spans of
    time in which this number decodes, in order."""
    waiting: defaultdict[float, int] = defaultdict(int)
    decoding: defaultdict[float, int] = defaultdict(int)
    for outcome in done:
        waiting[outcome.sent_s] += 1
        waiting[outcome.first_s] -= 1
        decoding[outcome.first_s] += 1
        decoding[outcome.last_s] -= 1
    most, waits, decodes = 0, 0, 0
    spans: list[tuple[float, float]] = []
    for begin, end in itertools.pairwise(sorted({*waiting, *decoding})):
        waits, decodes = waits + waiting.get(begin, 0), decodes + decoding.get(begin, 0)
        if waits == 0 and decodes > most:
            most, spans = decodes, []
        if waits == 0 and decodes == most > 0:
            spans.append((begin, end))
    return most, spans


def _per_token_s(outcome: Outcome, spans: Sequence[tuple[float, float]]) -> float:
    """Return the request's seconds per token in the spans, from its first to its last event of each span; the tokens of
    the first event are not counted. 0.0 if its tokens per event are not known, or if no span has two of its events at
    different times."""
    counts = outcome.event_tokens
    if counts is None:
        return 0.0
    times = list(itertools.accumulate(outcome.gaps_s, initial=outcome.first_s))
    so_far = list(itertools.accumulate(counts))
    seconds, tokens = 0.0, 0
    for place in range(bisect_left(spans, (outcome.first_s, 0.0)), len(spans)):
        begin, end = spans[place]
        if begin >= outcome.last_s:
            break
        first = bisect_left(times, begin - _ROUNDING_S)
        last = bisect_right(times, end + _ROUNDING_S) - 1
        if last > first:
            seconds += times[last] - times[first]
            tokens += so_far[last] - so_far[first]
    return seconds / tokens if tokens else 0.0

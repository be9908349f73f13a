"""The figures that every arm of `bench.cpu` measures. Only the standard library is imported, since one arm runs in an
environment of its own."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable

PROMPT, OUTPUT, STREAMS = 128, 64, 16
Serve = Callable[[int, int, int], None]
"""(seed, streams, output): serve so many fresh prompts of PROMPT tokens at once, each with so many greedy tokens."""


def prompts(seed: int, count: int) -> list[list[int]]:
    """Return ordinary token ids of SmolLM2. No two prompts of a run begin with the same tokens."""
    firsts = [7919 * (64 * seed + number) for number in range(count)]
    return [[300 + (first + 31 * place) % 40_000 for place in range(PROMPT)] for first in firsts]


def measure(serve: Serve, repeats: int = 3) -> dict[str, float]:
    """Measure the best of `repeats`, in tokens/s: prefill of one prompt, decode of one stream, output of STREAMS
    streams."""
    serve(0, STREAMS, 2)
    best = {"prefill": 0.0, "one_stream": 0.0, "many_streams": 0.0}
    for turn in range(repeats):
        first_s = _time(serve, 3 * turn + 1, 1, 1)
        whole_s = _time(serve, 3 * turn + 2, 1, OUTPUT)
        many_s = _time(serve, 3 * turn + 3, STREAMS, OUTPUT)
        best["prefill"] = max(best["prefill"], PROMPT / first_s)
        best["one_stream"] = max(best["one_stream"], (OUTPUT - 1) / (whole_s - first_s))
        best["many_streams"] = max(best["many_streams"], STREAMS * OUTPUT / many_s)
    return best


def report(figures: dict[str, float]) -> None:
    """Print the figures and the peak memory of this process, as the last line."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(figures | {"resident_mib": round(peak)}))
    sys.stdout.flush()


def _time(serve: Serve, seed: int, streams: int, output: int) -> float:
    began = time.perf_counter()
    serve(seed, streams, output)
    return time.perf_counter() - began

"""Requests to replay: a trace of a chat service (Mooncake's format), or a made-up one of the same shape.

A line has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`. These are names of the prompt's blocks of
512 tokens; each name stands for its block and all blocks before it. Pages are smaller, so a block is several pages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BLOCK = 512


@dataclass(frozen=True)
class TraceRequest:
    """`keys` are its full pages, in order. Equal keys mean equal pages with equal pages before them."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    keys: NDArray[np.uint64]


def load_trace(path: Path, page: int, limit: int = 0) -> list[TraceRequest]:
    """Return the first `limit` requests of the file; 0: all."""
    requests = []
    for line in path.read_text().splitlines()[: limit or None]:
        row = json.loads(line)
        keys = _keys(np.array(row["hash_ids"], np.uint64), row["input_length"] // page, page)
        requests.append(TraceRequest(row["timestamp"] / 1000, row["input_length"], max(row["output_length"], 1), keys))
    return requests


def make_trace(count: int, page: int, seed: int = 0) -> list[TraceRequest]:
    """Make conversations of about three turns after one short system prompt. Lengths are log-normal, as in the real
    trace."""
    rng = np.random.default_rng(seed)
    requests: list[TraceRequest] = []
    open_talks: list[tuple[float, int, list[int]]] = []
    fresh, now_s = 1, 0.0
    for _ in range(count):
        now_s += rng.exponential(0.3)
        if open_talks and rng.random() < 0.4:
            _, tokens, blocks = open_talks.pop(int(rng.integers(len(open_talks))))
            tokens += int(rng.lognormal(6.5, 0.8))
        else:
            tokens, blocks = int(np.clip(rng.lognormal(8.8, 1.1), 600, 120_000)), [0]
        missing = -(-tokens // BLOCK) - len(blocks)
        blocks = blocks + list(range(fresh, fresh + max(missing, 0)))
        fresh += max(missing, 0)
        output = int(np.clip(rng.lognormal(5.6, 0.8), 1, 2000))
        keys = _keys(np.array(blocks, np.uint64), tokens // page, page)
        requests.append(TraceRequest(now_s, tokens, output, keys))
        open_talks.append((now_s, tokens + output, blocks[: tokens // BLOCK]))
        del open_talks[:-200]
    return requests


def scaled(requests: Sequence[TraceRequest], span_s: float) -> list[TraceRequest]:
    """Return the requests compressed into this much time. Requests that arrive at the same time in the file are spread
    over the gap to the next."""
    arrivals = np.array([request.arrival_s for request in requests])
    times, first, counts = np.unique(arrivals, return_index=True, return_counts=True)
    gaps = np.diff(times, append=times[-1] + (times[-1] / max(len(times) - 1, 1)))
    place = np.arange(len(arrivals)) - np.repeat(first, counts)
    arrivals = arrivals + np.repeat(gaps / counts, counts) * place
    arrivals *= span_s / arrivals[-1] if arrivals[-1] > 0 else 0.0
    return [replace(request, arrival_s=float(at)) for request, at in zip(requests, arrivals, strict=True)]


def oracle_hits(requests: Sequence[TraceRequest], page: int, capacity_pages: int) -> float:
    """Return the share of prompt tokens that one LRU cache for all requests would have. A prompt is in the cache as
    soon as it was asked for."""
    cache: dict[int, None] = {}
    hits = total = 0
    for request in requests:
        keys = request.keys.tolist()
        found = 0
        for key in keys:
            if key not in cache:
                break
            found += 1
        hits += min(found, (request.input_tokens - 1) // page) * page
        total += request.input_tokens
        for key in reversed(keys):
            cache.pop(key, None)
            cache[key] = None
        while len(cache) > capacity_pages:
            del cache[next(iter(cache))]
    return hits / total


def _keys(blocks: NDArray[np.uint64], pages: int, page: int) -> NDArray[np.uint64]:
    per_block = BLOCK // page
    numbers = np.repeat(blocks * np.uint64(per_block), per_block) + np.tile(
        np.arange(per_block, dtype=np.uint64), len(blocks)
    )
    # Mixed, so that they are as uniform as hashes.
    keys = (numbers[:pages] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed: NDArray[np.uint64] = keys ^ (keys >> np.uint64(29))
    return mixed

"""Sets of requests for benchmarks, fixed by a seed, so that every arm serves the same work."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Request:
    """A request: token ids, and exactly `output_len` greedy tokens as its answer (end-of-sequence tokens are
    ignored)."""

    prompt_ids: tuple[int, ...]
    output_len: int


def uniform(
    count: int, prompt: tuple[int, int], output: tuple[int, int], vocab: tuple[int, int], seed: int = 0
) -> list[Request]:
    """Return requests with lengths uniform over the inclusive ranges, and token ids uniform over the range of
    `vocab`."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(prompt[0], prompt[1], count, endpoint=True)
    outputs = rng.integers(output[0], output[1], count, endpoint=True)
    return [
        Request(tuple(int(t) for t in rng.integers(*vocab, int(p))), int(o))
        for p, o in zip(prompts, outputs, strict=True)
    ]


def contender(doc: str | None) -> tuple[argparse.Namespace, list[Request]]:
    """Read the input of an arm that is a process of its own: model, batch and threads from flags, requests from
    stdin."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    return arguments, [Request(tuple(each["prompt_ids"]), each["output_len"]) for each in json.load(sys.stdin)]

"""Request sets for benchmarks: fixed by a seed, so that every contender serves the same work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Request:
    """Token ids in, and exactly `output_len` greedy tokens out (end of sequence ignored)."""

    prompt_ids: tuple[int, ...]
    output_len: int


def uniform(
    count: int, prompt: tuple[int, int], output: tuple[int, int], vocab: tuple[int, int], seed: int = 0
) -> list[Request]:
    """Lengths uniform over the inclusive ranges, token ids uniform over `vocab`'s range."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(prompt[0], prompt[1], count, endpoint=True)
    outputs = rng.integers(output[0], output[1], count, endpoint=True)
    return [
        Request(tuple(int(t) for t in rng.integers(*vocab, int(p))), int(o))
        for p, o in zip(prompts, outputs, strict=True)
    ]

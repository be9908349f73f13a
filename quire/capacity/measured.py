"""Quire's measured speeds by GPU and model, for `quire plan` (sources: docs/benchmarks.md, bench/LOG.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.capacity.model_sizes import ModelSizes

SMALL = ModelSizes("Qwen3-0.6B", 1024, 28, 3072, 16, 8, 128, 151_936, tied=True, context=40_960)
LARGE = ModelSizes("Qwen3-8B", 4096, 36, 12_288, 32, 8, 128, 151_936, tied=False, context=40_960)
BATCHES = (1, 8, 32, 128, 256)
DECODE_CONTEXT = 192
"""Mean tokens of a sequence during the runs that measured `itl_ms`: prompts of 128 tokens, and half of the output."""
LOAD_PROMPT, LOAD_OUTPUT, LOAD_BATCH = 512, 256, 256
"""The run that measured `load_tokens_per_s`: tokens of a prompt, tokens of an answer, and sequences at a time. 512
requests were sent at once. A test compares the estimate with this run."""


@dataclass(frozen=True)
class Speeds:
    """Measured speeds of one model. `itl_ms`: time between tokens for each of BATCHES, without prefill beside it."""

    itl_ms: tuple[float, ...]
    prefill_tokens_per_s: float
    prompt_1024_ms: float
    load_tokens_per_s: float


@dataclass(frozen=True)
class Gpu:
    """The measured speed of a GPU. `bandwidth` is the bandwidth of a copy kernel, in bytes per second. `flops` is the
    speed of large bf16 GEMMs. All were measured but the H100's `flops`, which is copied from the H200, because the two
    chips differ only in their memory."""

    name: str
    memory_gib: float
    bandwidth: float
    flops: float
    small: Speeds
    large: Speeds
    source: str


GPUS: Mapping[str, Gpu] = {
    "h200": Gpu(
        "H200",
        139.0,
        4.3e12,
        790e12,
        Speeds((0.69, 0.95, 1.20, 2.06, 2.86), 388_619, 8.13, 39_079),
        Speeds((3.91, 4.402, 4.76, 6.20, 9.67), 41_862, 27.35, 10_770),
        "one H200, 2026-11-23, commit 9d7df77, through the services",
    ),
    "h100": Gpu(
        "H100",
        78.0,
        3.0e12,
        790e12,
        Speeds((1.22, 1.32, 1.56, 2.55, 3.77), 360_354, 9.8, 29_361),
        Speeds((6.12, 6.27, 6.67, 8.13, 10.85), 39_429, 30.8, 9_908),
        "one H100, 2026-11-25, commit 69afc72, mostly in process (bench/LOG.md)",
    ),
}

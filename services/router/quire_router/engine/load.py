"""A scheduler's model and load, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What WatchLoad said last."""

    phase: str = "connecting"
    progress: float = 0.0
    detail: str = ""
    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 1


@dataclass(frozen=True, slots=True)
class Model:
    """What GetModelInfo said of the model that a scheduler runs."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    digest: bytes
    parameters: int
    weights_version: str
    capabilities: tuple[str, ...]

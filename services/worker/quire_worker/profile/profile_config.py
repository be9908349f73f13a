"""The options of a profile, in addition to a worker's options."""

from __future__ import annotations

from dataclasses import dataclass

from quire_common.config import option
from quire_worker.config import WorkerConfig


@dataclass(frozen=True)
class ProfileConfig(WorkerConfig):
    """Where a step's time goes: runs a model's steps under torch's profiler. Takes the worker's options too."""

    batch: int = option(32, "sequences that decode in the step", at_least=0)
    context: int = option(1024, "tokens of each, the one that is computed included", at_least=1)
    prompt: int = option(0, "tokens of a fresh prompt that the step prefills beside them", at_least=0)
    temperature: float = option(0.0, "of all sequences; 0: greedy", at_least=0.0)
    top_k: int = option(0, "of all sequences; 0: all tokens", at_least=0)
    top_p: float = option(1.0, "of all sequences; 1: all tokens", at_least=0.0, at_most=1.0)
    min_p: float = option(0.0, "of all sequences; 0: all tokens", at_least=0.0, at_most=1.0)
    frequency_penalty: float = option(0.0, "of all sequences; other than 0: with logits processor states")
    logprobs: int = option(-1, "alternatives that all sequences ask for beside their token's; -1: none", at_least=-1)
    steps: int = option(10, "steps that are traced", at_least=1)
    out: str = option("profile", "folder for trace.json (Chrome's format) and kernels.json")

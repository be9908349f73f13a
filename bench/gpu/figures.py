"""The figures with which GPU benchmarks compare: vLLM's figures on the same GPU, and Quire's targets.

vLLM's figures are of release 0.24.0, measured on 2026-11-20 on one NVIDIA H200 with torch 2.11.0+cu130, triton 3.6.0
and Python 3.12. The run used random bf16 weights, greedy sampling, no prefix caching, FlashAttention 3, CUDA graphs and
compilation. Its cold start is vLLM's own start-up without weights to read; the first token would come after that. The
targets are those of the issue for the GPU worker. `docs/benchmarks.md` has both, and Quire's results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """The figures for one row; None if there is no such figure."""

    figure: str
    """Which of a row's figures counts."""
    vllm: float | None
    wanted: float

    @property
    def below(self) -> bool:
        """Whether smaller is better, as for times and costs."""
        return not self.figure.endswith("tok_s")

    def beside(self, value: float) -> dict[str, float | bool | None]:
        """Return the figure with which a value is compared, and whether the value is good enough."""
        return {
            "vllm": self.vllm,
            "wanted": self.wanted,
            "beats_vllm": None if self.vllm is None else self._as_good(value, self.vllm) and value != self.vllm,
            "reached": self._as_good(value, self.wanted),
        }

    def spelled(self) -> str:
        """Return the figures as text."""
        return f"(vLLM {self.vllm:g}, wanted {self.wanted:g})" if self.vllm else f"(wanted {self.wanted:g})"

    def _as_good(self, value: float, other: float) -> bool:
        return value <= other if self.below else value >= other


ITL: Mapping[str, Mapping[int, Target]] = {
    model: {
        batch: Target("itl_ms", vllm, wanted)
        for batch, vllm, wanted in zip((1, 8, 32, 128, 256), theirs, ours, strict=True)
    }
    for model, theirs, ours in (
        ("0.6B", (1.85, 1.99, 2.19, 3.38, 5.67), (0.75, 1.15, 1.4, 2.6, 3.9)),
        ("8B", (4.92, 4.96, 5.50, 7.57, 11.5), (3.95, 4.4, 4.8, 6.6, 10.2)),
    )
}
"""Milliseconds from token to token, by model and sequences that decode, prompts of 128."""

ROWS: Mapping[str, Target] = {
    **{f"{model} itl {batch}": target for model, by_batch in ITL.items() for batch, target in by_batch.items()},
    "0.6B 512 x 512/256": Target("output_tok_s", 31_839, 42_000),
    "8B 512 x 512/256": Target("output_tok_s", 10_148, 11_000),
    "0.6B 256 x 100..1024": Target("output_tok_s", 23_773, 30_000),
    "0.6B prefill 32 x 4096": Target("input_tok_s", 352_582, 390_000),
    "8B prefill 32 x 4096": Target("input_tok_s", 41_070, 41_500),
    "0.6B prompt 1024": Target("first_ms", 20.1, 8.0),
    "8B prompt 1024": Target("first_ms", 27.5, 27.0),
}
"""Targets of `bench.gpu.engine`, by model and row."""

OVER_GREEDY: Mapping[str, Target] = {
    "sampling 256": Target("percent", None, 8.0),
    "logprobs 256": Target("percent", None, 5.0),
}
"""What inter-token latency at 256 sequences may take more than with greedy requests, in percent."""

OVER_FREE: Mapping[str, Target] = {
    "grammars 32": Target("percent", None, 5.0),
    "grammars 128": Target("percent", None, 5.0),
}
"""Most growth of the time per token if every sequence has a grammar, in percent, by `bench.gpu.grammars`' rows."""

SERVICES_COST = Target("cost_percent", None, 3.0)
"""What the table may lose through the services, in percent."""

OVER_HTTP: Mapping[int, tuple[Target, ...]] = {
    1: (Target("ttft_p50_ms", 13.2, 6.0), Target("tpot_p50_ms", 1.61, 0.85)),
    64: (Target("output_tok_s", 13_632, 20_000),),
    256: (Target("output_tok_s", 16_969, 28_000),),
}
"""By concurrency: streaming, 512 in / 128 out, 0.6B."""

VLLM_OVER_HTTP: Mapping[int, Mapping[str, float]] = {
    64: {"vllm_ttft_p50_ms": 160.0, "vllm_tpot_p50_ms": 3.3},
    256: {"vllm_ttft_p50_ms": 427.0, "vllm_tpot_p50_ms": 11.6},
}
"""The same: vLLM's other figures, beside which nothing is wanted."""

COLD_START: Mapping[str, Target] = {
    "cold start, empty kernel cache": Target("first_token_s", 86.0, 40.0),
    "cold start, warm kernel cache": Target("first_token_s", 86.0, 12.0),
    "cold start, 8B shards, empty kernel cache": Target("first_token_s", None, 40.0),
    "cold start, 8B shards, warm kernel cache": Target("first_token_s", None, 12.0),
    "cold start, 8B shards, warm kernel cache, empty page cache": Target("first_token_s", None, 12.0),
}
"""Seconds to the first token, by `bench.gpu.cold_start`'s rows."""

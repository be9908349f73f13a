"""The CPU worker against transformers, in float32: logits of prompts, and greedy tokens served together.

Chunked prefill is forced by a small budget, preemption by dropping sequences' pages and recomputing them elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire_worker.loading import LoadedModel, LoadOptions, load_model
from quire_worker.runner import ModelRunner
from tests.model.batches import PAGE_SIZE, Run, make_batch
from tests.oracle import Oracle, quiet_transformers

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
LOGIT_TOLERANCE = 1e-4

COMMON: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama, scaled rope, biases": ("Llama", {"rope_scaling": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama, linear rope, tied": (
        "Llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 45, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def write_tiny(name: str, folder: Path) -> Path:
    """A random model in bf16, its biases and gains random too, written by transformers itself."""
    with quiet_transformers():
        import transformers

        family, changes = TINY[name]
        torch.manual_seed(sum(name.encode()))
        config = getattr(transformers, f"{family}Config")(**(COMMON | changes))
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def demo() -> Path:
    return DEMO


pytestmark = pytest.mark.usefixtures("one_thread")


def load(folder: Path, kv_cache_bytes: int = 64 << 20) -> LoadedModel:
    return load_model(folder, LoadOptions(kv_cache_bytes=kv_cache_bytes))


def prompts_of(count: int, vocab_size: int, longest: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, *random.integers(1, longest, max(0, count - 8))]
    return [[int(t) for t in random.integers(0, vocab_size, length)] for length in lengths[:count]]


@dataclass
class Stream:
    text: list[int]
    prompt_length: int
    computed: int = 0


class Server:
    """The smallest engine: everyone decodes, prefills share a token budget, some are preempted by recompute."""

    def __init__(self, runner: ModelRunner, longest: int, *, budget: int, preempt: Callable[[int, int], bool]) -> None:
        self.runner = runner
        self.budget = budget
        self.preempt = preempt
        self.pages_each = -(-longest // PAGE_SIZE)
        self.half = runner.pool.num_pages // 2

    def generate(self, prompts: list[list[int]], length: int) -> list[list[int]]:
        streams = [Stream(list(prompt), len(prompt)) for prompt in prompts]
        moved = [0] * len(streams)
        step = 0
        while any(len(each.text) < each.prompt_length + length for each in streams):
            runs, chosen, budget = [], [], self.budget
            for index, each in enumerate(streams):
                if len(each.text) == each.prompt_length + length:
                    continue
                if each.computed and self.preempt(step, index):
                    each.computed, moved[index] = 0, 1 - moved[index]
                left = len(each.text) - each.computed
                rows = 1 if left == 1 else min(left, budget)
                if rows == 0:
                    continue
                budget -= rows if left > 1 else 0
                first = 1 + index * self.pages_each + moved[index] * self.half
                pages = range(first, first + self.pages_each)
                chunk = each.text[each.computed : each.computed + rows]
                runs.append(Run(chunk, each.computed, list(pages), sample=rows == left))
                chosen.append(each)
            drawn = iter(self.runner.run(make_batch(runs)).token.tolist())
            for each, run in zip(chosen, runs, strict=True):
                each.computed += len(run.token)
                if run.sample:
                    each.text.append(next(drawn))
            step += 1
        return [each.text[each.prompt_length :] for each in streams]


def check_streams(oracle: Oracle, prompts: list[list[int]], outputs: list[list[int]], ties_allowed: int) -> None:
    ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        divergence = oracle.first_divergence(prompt, output)
        if divergence is not None:
            assert divergence.is_true_tie, divergence
            ties += 1
    assert ties <= ties_allowed


def check_logits(folder: Path, lengths: tuple[int, ...]) -> None:
    model, oracle = load(folder), Oracle(folder)
    for length in lengths:
        tokens = np.random.default_rng(length).integers(0, model.spec.vocab_size, length).tolist()
        pages = list(range(1, 2 + length // PAGE_SIZE))
        found = model.runner.all_logits(make_batch([Run(tokens, 0, pages)]))
        wanted = oracle.logits(tokens)
        assert wanted.abs().max() > 0.5, "logits too small to mean anything"
        assert (found - wanted).abs().max() < LOGIT_TOLERANCE


def test_prompt_logits(tiny: Path) -> None:
    check_logits(tiny, (1, 16, 130))


def test_greedy_streams_served_together(tiny: Path) -> None:
    model = load(tiny)
    prompts, length = prompts_of(10, model.spec.vocab_size, 150), 24
    plain = Server(model.runner, 256, budget=100_000, preempt=lambda step, index: False)
    rough = Server(model.runner, 256, budget=37, preempt=lambda step, index: (step * 7 + index) % 23 == 0)
    outputs = rough.generate(prompts, length)
    assert outputs == plain.generate(prompts, length)
    check_streams(Oracle(tiny), prompts, outputs, ties_allowed=1)


def test_demo_logits(demo: Path) -> None:
    check_logits(demo, (1, 48, 700))


@pytest.mark.deep
def test_demo_greedy_streams(demo: Path) -> None:
    """32 prompts of mixed lengths, 256 tokens each, chunked prefill and preemption forced; at most 2 ties."""
    model = load(demo, 300 << 20)
    prompts = prompts_of(32, model.spec.vocab_size, 300)
    server = Server(model.runner, 560, budget=128, preempt=lambda step, index: step % 61 == 60 and index == step // 61)
    check_streams(Oracle(demo), prompts, server.generate(prompts, 256), ties_allowed=2)

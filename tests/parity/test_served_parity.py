"""32 greedy streams served together, against transformers: chunked prefill and preemption forced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.harness.local_engine import LocalEngine, load
from quire_common.credit import Report
from quire_common.sequence import Sequence, Stop
from tests.oracle import Oracle
from tests.parity.test_transformers_parity import DEMO, write_tiny
from tests.tiers import deep_after

PROMPTS = 32
NEW_TOKENS = 256
MOST_TIES = 2
CHUNK = 48
MODELS = ("qwen3", "demo", "qwen2")


@pytest.fixture(scope="module", params=deep_after(1, MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DEMO if request.param == "demo" else write_tiny(request.param, tmp_path_factory.mktemp("tiny"))


def test_served_together_equals_transformers(folder: Path) -> None:
    model = load(folder, kv_cache_bytes=64 << 20)
    rng = np.random.default_rng(7)
    lengths = rng.integers(3, 200, PROMPTS)
    prompts = [rng.integers(32, model.facts.vocab_size, n).astype(np.int32) for n in lengths]
    need = sum(-(-(len(p) + NEW_TOKENS) // 16) for p in prompts)
    local = LocalEngine(
        model,
        max_num_seqs=PROMPTS,
        num_pages=need // 2,  # not enough for all at once: somebody must be preempted
        max_num_batched_tokens=64,
        long_prefill_token_threshold=CHUNK,
    )
    chunks: list[int] = []
    local.reports = lambda report: chunks.extend(_prefilled(report))
    for handle, prompt in enumerate(prompts):
        local.submit(handle, Sequence(prompt, Stop(max_tokens=NEW_TOKENS, ignore_eos=True)))
    served = local.run()
    local.check_quiet()
    assert local.scheduler.stats.preemptions > 0, "the pages sufficed: the test proves nothing"
    assert max(chunks) <= 64 and sum(chunks) > sum(lengths), "prefill was not cut, or nothing was recomputed"

    oracle = Oracle(folder)
    ties = 0
    for handle, prompt in enumerate(prompts):
        assert len(served[handle].tokens) == NEW_TOKENS
        divergence = oracle.first_divergence(prompt.tolist(), served[handle].tokens)
        if divergence is not None:
            assert divergence.is_true_tie, f"stream {handle} leaves transformers at {divergence}"
            ties += 1
    assert ties <= MOST_TIES


def _prefilled(report: Report) -> list[int]:
    tokens: list[int] = report.step_prefill_tokens.tolist()
    return tokens

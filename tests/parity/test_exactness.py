"""Quire against Quire, no ties excepted: alone, in any batch, after preemption and after a restart, the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.harness.local_engine import LocalEngine, load, serve
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.loading import LoadedModel
from tests.parity.test_transformers_parity import DEMO

ROOT = Path(__file__).resolve().parents[2]
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=2**63 + 11, sample=3),
    Sampling(temperature=1.3, min_p=0.05, seed=5, logprobs=2),
    Sampling(temperature=1.1, top_p=0.97, typical_p=0.8, seed=7),
)


@cache
def model() -> LoadedModel:
    return load(DEMO, kv_cache_bytes=96 << 20)


@dataclass(frozen=True)
class Ask:
    length: int
    salt: int
    sampling: Sampling
    max_tokens: int


def sequence(ask: Ask, output: tuple[int, ...] = ()) -> Sequence:
    prompt = np.random.default_rng(ask.salt).integers(300, 4096, ask.length).astype(np.int32)
    return Sequence(prompt, Stop(max_tokens=ask.max_tokens), ask.sampling, np.array(output, np.int32))


@cache
def alone(ask: Ask) -> tuple[int, ...]:
    return tuple(serve(model(), {0: sequence(ask)}, max_num_seqs=4)[0].tokens)


asks = st.builds(
    Ask,
    length=st.sampled_from((1, 2, 15, 16, 17, 33, 64, 65, 130)),
    salt=st.integers(0, 3),
    sampling=st.sampled_from(SAMPLINGS),
    max_tokens=st.sampled_from((1, 2, 9, 24)),
)


@pytest.mark.deep
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batch=st.lists(asks, min_size=2, max_size=10),
    rows=st.sampled_from((1, 3, 8)),
    step=st.sampled_from((16, 40, 512)),
    slack=st.integers(0, 12),
    late=st.integers(0, 6),
)
def test_in_any_batch_and_after_preemption(batch: list[Ask], rows: int, step: int, slack: int, late: int) -> None:
    """Random companions, row counts, chunk sizes, arrivals and page scarcity: everybody gets what they get alone."""
    largest = max(-(-(a.length + a.max_tokens) // 16) for a in batch)
    local = LocalEngine(model(), max_num_seqs=rows, num_pages=largest + 2 + slack, max_num_batched_tokens=step)
    for handle, ask in enumerate(batch):
        if handle >= 2:
            for _ in range(late):
                local.step()
        local.submit(handle, sequence(ask))
    served = local.run()
    local.check_quiet()
    for handle, ask in enumerate(batch):
        assert tuple(served[handle].tokens) == alone(ask), (handle, ask)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("known", (1, 7, 23))
def test_continued_from_what_was_emitted(sampling: Sampling, known: int) -> None:
    """What a migration or a preemption does: prompt and emitted tokens go in, the rest comes out."""
    ask = Ask(40, 1, sampling, 24)
    whole = alone(ask)
    rest = serve(model(), {0: sequence(ask, whole[:known])}, max_num_seqs=2)[0].tokens
    assert whole[: min(known, len(whole))] + tuple(rest) == whole


@pytest.mark.deep
def test_preemption_happened_at_all() -> None:
    """The property test above must not pass because pages always sufficed."""
    local = LocalEngine(model(), max_num_seqs=8, num_pages=14, max_num_batched_tokens=64)
    for handle in range(6):
        local.submit(handle, sequence(Ask(33, handle, SAMPLINGS[1], 100)))
    local.run()
    local.check_quiet()
    assert local.scheduler.stats.preemptions > 0


@pytest.mark.deep
def test_after_a_restart() -> None:
    """Another process, with two torch threads, gives the same tokens."""
    wanted = {i: alone(Ask(65, 2, s, 24)) for i, s in enumerate(SAMPLINGS)}
    script = """
import json
from bench.harness.local_engine import load, serve
from tests.parity.test_exactness import Ask, DEMO, SAMPLINGS, sequence
model = load(DEMO, kv_cache_bytes=32 << 20, threads=2)
served = serve(model, {i: sequence(Ask(65, 2, s, 24)) for i, s in enumerate(SAMPLINGS)})
print(json.dumps({i: s.tokens for i, s in served.items()}))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {int(i): tuple(t) for i, t in json.loads(done.stdout).items()} == wanted

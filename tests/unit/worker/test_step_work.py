"""Work of a step by the model's sizes, for achieved FLOP/s and bandwidth."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quire_common.credit.hello import KvGroup, PageGeometry
from quire_common.telemetry import metrics
from quire_worker.engine.in_flight_step import InFlightStep
from quire_worker.model.arch_spec import ArchSpec, Attention, Dense, LayerSpec, NormSpec
from quire_worker.observer import WorkerObserver
from quire_worker.step import StepSize
from quire_worker.step_work import StepWork
from tests.fakes.worker.engine_bench import EngineBench, a_start

# Two layers: q 8x8, k and v 4x8, o 8x8, gate and up 16x8, down 8x16.
LAYERS = (LayerSpec(Attention(2, 1, 4), Dense(16)),) * 2
SPEC = ArchSpec("A", 100, 8, LAYERS, 64, NormSpec(1e-5))
LAYER = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 2 * 16 * 8 + 8 * 16


def pages(page_bytes: int = 640) -> PageGeometry:
    return PageGeometry(16, (KvGroup("kv", page_bytes, "plain", "float32", 2, 1, 4),), b"")


def step(decodes: list[int], chunks: list[tuple[int, int]]) -> InFlightStep:
    """A step with decode rows at these positions, and chunks of so many tokens from these positions."""
    position = np.array([*decodes, *(first for first, _ in chunks)], np.int32)
    count = np.array([*(1 for _ in decodes), *(tokens for _, tokens in chunks)], np.int32)
    rows = len(position)
    return InFlightStep(
        1, 1, np.arange(rows, dtype=np.int32), np.zeros(rows, np.int64), count, position, np.ones(rows, bool),
        len(decodes), False, 0,
    )  # fmt: skip  # a list of columns


def test_operations_are_those_of_the_models_matrices() -> None:
    work = StepWork.of(SPEC, pages(), 4000)
    assert work.flops_per_token == 2 * 2 * LAYER
    assert work.flops_per_sample == 2 * 100 * 8
    assert work.flops_per_pair == 4 * 8 * 2, "scores and their sum, over all query heads of both layers"
    assert work.kv_bytes_per_token == 40
    size = StepSize(tokens=5, prefill_tokens=4, sampled=2, pairs=30, context=20)
    assert work.flops(size) == 5 * 4 * LAYER + 2 * 1600 + 30 * 64
    assert work.num_bytes(size) == pytest.approx(work.weight_bytes + 25 * 40)


def test_an_embedding_that_is_no_head_is_not_read_as_a_whole() -> None:
    tied = dataclasses.replace(SPEC, tied_embeddings=True)
    total = 2 * LAYER + 100 * 8 * 2 + 5 * 8  # weights, embedding, head, norms
    assert StepWork.of(SPEC, pages(), 4 * total).weight_bytes == pytest.approx(4 * (total - 800))
    assert StepWork.of(tied, pages(), 4000).weight_bytes == 4000


def test_a_step_attends_to_what_is_before_each_token() -> None:
    assert step([3, 7], []).size(2) == StepSize(2, 0, 2, 12, 12)
    # A chunk of 3 tokens behind 4: the first attends to 5, then 6 and 7.
    assert step([3], [(4, 3)]).size(1) == StepSize(4, 3, 1, 4 + 18, 4 + 7)


def test_a_long_prompt_does_not_overflow() -> None:
    size = step([], [(122_880, 8192)]).size(1)
    assert size.pairs == 8192 * 122_880 + 8192 * 8193 // 2


def test_an_engine_counts_operations_bytes_and_busy_time() -> None:
    work = StepWork(1.0, 10.0, 100.0, 1000.0, 0.5)
    names = ("quire_worker_flops_total", "quire_worker_memory_bytes_total", "quire_worker_busy_seconds_total")
    before = [metrics.registry.get_sample_value(name) or 0.0 for name in names]
    bench = EngineBench(observer=WorkerObserver(work))
    bench.grant(a_start(0, [5, 6, 7], [1, 2], max_tokens=3))
    bench.run()
    flops, num_bytes, busy = (
        (metrics.registry.get_sample_value(name) or 0.0) - was for name, was in zip(names, before, strict=True)
    )
    # Three tokens of the prompt, then one and one; a token is drawn each time.
    assert flops == (3 + 1 + 1) + 10 * 3 + 100 * (1 + 2 + 3 + 4 + 5)
    assert num_bytes == 3 * 1000 + 0.5 * ((3 + 3) + (4 + 1) + (5 + 1))
    assert busy > 0

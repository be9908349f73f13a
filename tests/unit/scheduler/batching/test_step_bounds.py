"""How many tokens a step may have: by the configuration, and by what the worker has room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire_common.credit.hello import worker_hello_from_pb, worker_hello_to_pb
from quire_scheduler.batching.grant_policy import make_budget
from quire_scheduler.config import SchedulerConfig
from tests.fakes.worker.fake_worker import make_hello

GPU = replace(make_hello(page_size=64), capabilities=("cuda",))


@pytest.mark.parametrize(
    ("device", "room", "configured", "tokens"),
    [
        ("cpu", 0, 0, 512),
        ("cpu", 0, 4096, 4096),
        ("cuda", 0, 0, 8192),
        ("cuda", 16_384, 0, 16_384),
        ("cuda", 16_384, 2048, 2048),
        ("cuda", 8192, 20_000, 8192),
    ],
)
def test_step_budget_follows_the_workers_room(device: str, room: int, configured: int, tokens: int) -> None:
    hello = replace(GPU, capabilities=(device,), max_step_tokens=room)
    # As it comes from the wire.
    budget = make_budget(
        SchedulerConfig(max_num_batched_tokens=configured), worker_hello_from_pb(worker_hello_to_pb(hello)), 0
    )
    assert budget.tokens_per_step == budget.prefill_tokens_beside_decoders == budget.chunk_cap == tokens


def test_configured_prefill_bounds_below_the_step_budget_stay() -> None:
    config = SchedulerConfig(prefill_tokens_beside_decoders=256, long_prefill_token_threshold=1024)
    budget = make_budget(config, replace(GPU, max_step_tokens=16_384), 0)
    assert (budget.prefill_tokens_beside_decoders, budget.chunk_cap) == (256, 1024)


@pytest.mark.parametrize(("room", "lines"), [(8192, 1), (20_000, 0), (0, 0)])
def test_reduced_step_budget_is_logged(caplog: pytest.LogCaptureFixture, room: int, lines: int) -> None:
    make_budget(SchedulerConfig(max_num_batched_tokens=20_000), replace(GPU, max_step_tokens=room), 0)
    said = [record.getMessage() for record in caplog.records]
    assert said.count("steps are smaller than configured") == lines

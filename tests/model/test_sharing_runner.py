"""Steps are computed by as many threads as neighbours leave, and give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire_worker import model_source
from quire_worker.config import WorkerConfig
from quire_worker.model.decoder import Decoder
from quire_worker.ops.cpu.cpu_ops import CpuOps
from quire_worker.ops.cpu.job_runner import JobRunner
from quire_worker.ops.torch_reference import TorchOps
from quire_worker.step import DeviceTiming, StepBatch, StepOutput
from quire_worker.threads import sharing_runner
from quire_worker.threads.core_meter import CoreMeter
from quire_worker.threads.share import Interval
from quire_worker.transformers_backend.decoder import TransformersDecoder
from tests.model.folders import write_config


class _Runner:
    """More threads are slower in the first five steps, and faster from then on."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.now_s = 0.0

    def run(self, batch: StepBatch) -> StepOutput:
        threads = torch.get_num_threads()
        self.threads.append(threads)
        self.now_s += 0.01 * threads if len(self.threads) <= 5 else 0.004 / threads
        return StepOutput(np.zeros(0, np.int32), None, DeviceTiming(0, 0, 0), {})


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_a_crowded_host_gets_fewer_threads_and_an_idle_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded, idle = Interval(2.0, 0.5, 0.0), Interval(2.0, 0.0, 8.0)
    intervals = iter([crowded] * 4 + [idle] * 6)
    monkeypatch.setattr(CoreMeter, "works", True)
    monkeypatch.setattr(CoreMeter, "measure_interval", lambda meter: next(intervals))
    monkeypatch.setattr(sharing_runner, "INTERVAL_S", 0.0)
    inner = _Runner()
    monkeypatch.setattr(sharing_runner, "time", SimpleNamespace(monotonic=lambda: inner.now_s))
    monkeypatch.setattr(CoreMeter, "__init__", lambda meter: None)
    runner = sharing_runner.SharingRunner(inner)
    batch: Any = SimpleNamespace(token=np.zeros(16, np.int64))
    for _ in range(10):
        runner.run(batch)
    assert inner.threads == [4, 2, 2, 1, 1, 1, 2, 2, 2, 4]


@pytest.mark.parametrize(("cores", "asked", "threads"), [(1, 0, 1), (3, 0, 3), (64, 0, 4), (1, 3, 3)])
def test_default_threads_follow_affinity_and_quota(
    cores: int, asked: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own choice, 4 here, knows affinity alone."""
    monkeypatch.setattr(model_source, "usable_cores", lambda: cores)
    monkeypatch.setattr(model_source, "_load_on_gpu", lambda *_: None)
    config = WorkerConfig(model=str(write_config(tmp_path)), load_format="dummy", device="cuda", torch_threads=asked)
    model_source.load_configured(config, lambda *_: None)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("decoder", "ops", "asked", "shares"),
    [
        (Decoder, CpuOps, 0, True),
        (Decoder, CpuOps, 2, False),
        (Decoder, TorchOps, 0, False),
        (TransformersDecoder, CpuOps, 0, False),
    ],
)
def test_steps_share_cores_by_default_where_threads_change_no_bit(
    decoder: type, ops: type, asked: int, shares: bool
) -> None:
    runner: Any = SimpleNamespace(decoder=object.__new__(decoder))
    runner.decoder.ops = object.__new__(ops)
    sharing = model_source._sharing(runner, WorkerConfig(model="m", torch_threads=asked))
    assert isinstance(sharing, sharing_runner.SharingRunner) == shares


def test_kernels_use_the_threads_that_torch_has_now() -> None:
    runner = JobRunner()
    for now in (4, 2, 1):
        torch.set_num_threads(now)
        assert runner.threads_for(cost_ns=1 << 30, num_items=64) == now

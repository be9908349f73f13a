"""Steps are computed by as many threads as neighbours leave, and give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire_worker.step import DeviceTiming, StepBatch, StepOutput
from quire_worker.threads import sharing_runner
from quire_worker.threads.core_meter import CoreMeter
from quire_worker.threads.share import Interval


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
    monkeypatch.setattr(CoreMeter, "read", lambda meter: next(intervals))
    monkeypatch.setattr(sharing_runner, "INTERVAL_S", 0.0)
    inner = _Runner()
    monkeypatch.setattr(sharing_runner, "time", SimpleNamespace(monotonic=lambda: inner.now_s))
    monkeypatch.setattr(CoreMeter, "__init__", lambda meter: None)
    runner = sharing_runner.SharingRunner(inner)
    batch: Any = SimpleNamespace(token=np.zeros(16, np.int64))
    for _ in range(10):
        runner.run(batch)
    assert inner.threads == [4, 2, 2, 1, 1, 1, 2, 2, 2, 4]

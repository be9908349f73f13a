"""SharingRunner: a Runner that computes its steps with as many threads as a ThreadShare decides."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from quire_worker.threads.core_meter import CoreMeter
from quire_worker.threads.pace import Pace
from quire_worker.threads.share import ThreadShare

if TYPE_CHECKING:
    from quire_worker.engine.ports import Runner
    from quire_worker.step import StepBatch, StepOutput

INTERVAL_S = 0.2
"""To read the counters takes some 0.1 ms."""


class SharingRunner:
    """Only for decoders whose layers CpuOps computes: their results have the same bits with any number of threads. The
    first steps use all threads."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._threads = torch.get_num_threads()
        self._meter = CoreMeter()
        self._share = ThreadShare(self._threads) if self._meter.works else None
        self._pace = Pace()
        self._due = time.monotonic() + INTERVAL_S

    def run(self, batch: StepBatch) -> StepOutput:
        """Run a step and record its time. At most five times a second, before a step, set torch's number of threads as
        the ThreadShare decides. If the kernel does not report how long threads wait, the number never changes."""
        share = self._share
        if share is None:
            return self._runner.run(batch)
        began = time.monotonic()
        if began >= self._due:
            share.observe(self._meter.measure_interval(), self._pace)
            self._pace, self._due = Pace(), began + INTERVAL_S
            if share.threads != self._threads:
                self._threads = share.threads
                torch.set_num_threads(self._threads)
            began = time.monotonic()
        output = self._runner.run(batch)
        self._pace.add(len(batch.token), time.monotonic() - began)
        return output

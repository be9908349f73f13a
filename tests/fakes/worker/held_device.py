"""A device whose steps end when the test says so: what lies between a launch and its end is the test's to choose."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from quire_worker.engine.device import InlineDevice
from quire_worker.engine.ports import Runner, StepOutcome
from quire_worker.step import StepBatch


class HeldDevice:
    """`launched` are steps in flight; `end` runs the oldest, or so many of them, at that moment."""

    def __init__(self, runner: Runner) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.launched: deque[StepBatch] = deque()
        self._inner = InlineDevice(runner)

    def launch(self, batch: StepBatch) -> None:
        self.launched.append(batch)

    def end(self, count: int = 1) -> None:
        for _ in range(count):
            self._inner.launch(self.launched.popleft())

    def prepare(self) -> bool:
        return self._inner.prepare()

    def take_outcomes(self) -> list[StepOutcome]:
        return self._inner.take_outcomes()

    def drain(self) -> None:
        self.end(len(self.launched))
        self._inner.drain()

    def close(self) -> None:
        self._inner.close()

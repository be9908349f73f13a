"""Devices that run a synchronous Runner: ThreadDevice on a thread of its own, InlineDevice within `launch`, for
comparison."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from quire_common.errors import Internal
from quire_common.telemetry.logs import get_logger
from quire_worker.engine.ports import StepOutcome
from quire_worker.engine.spec import STEP_TIMEOUT_S
from quire_worker.engine.step_runner import StepRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.engine.ports import Drafter, RowGate, Runner
    from quire_worker.step import StepBatch

log = get_logger(__name__)
# The longest time that `close` waits for a device: a step or a copy that hangs must not keep the process alive.
CLOSE_LIMIT_S = 5.0
_POLL_S = 0.001


class StepClock:
    """Measures the time since a step was last launched or has last ended, while steps are in flight. One thread
    launches steps; another thread ends them."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._launched = self._ended = 0
        self._moved_s = time.monotonic()

    def note_launch(self) -> None:
        """Note that a step goes to the device."""
        self._launched += 1
        self._moved_s = time.monotonic()

    def note_end(self) -> None:
        """Note that the oldest step in flight has ended."""
        self._ended += 1
        self._moved_s = time.monotonic()

    def await_steps(self, reached: threading.Event) -> None:
        """Block until `reached` is set, which the device does when all steps launched before have ended. Raises
        DEVICE_HUNG if a step takes longer than the limit, counted from the last launch or end; the time that it ran
        before this call counts. If no step is in flight, the time counts from now."""
        self._await(reached.wait)

    def poll(self, is_done: Callable[[], bool]) -> None:
        """Call `is_done` every millisecond until it returns True. Raises DEVICE_HUNG as `await_steps` does, and what
        `is_done` raises."""

        def wait(left_s: float) -> bool:
            if is_done():
                return True
            time.sleep(min(left_s, _POLL_S))
            return False

        self._await(wait)

    def _await(self, wait: Callable[[float], bool]) -> None:
        """Call `wait` until it returns True. Its argument is the number of seconds that are left, which it may wait at
        most. Raises as `await_steps` does."""
        if self._launched == self._ended:
            self._moved_s = time.monotonic()
        while not wait(max(0.0, self._moved_s + self._limit_s - time.monotonic())):
            if time.monotonic() - self._moved_s >= self._limit_s:
                raise hung(self._limit_s)


def poll_until(is_done: Callable[[], bool], limit_s: float) -> None:
    """Call `is_done` every millisecond until it returns True. Raises DEVICE_HUNG after `limit_s` seconds, and what
    `is_done` raises."""
    StepClock(limit_s).poll(is_done)


class InlineDevice:
    """A Device whose steps have ended when `launch` returns."""

    def __init__(self, runner: Runner, drafter: Drafter | None = None, gate: RowGate | None = None) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._runner = StepRunner(runner, drafter, gate)
        self._ended: list[StepOutcome] = []

    def launch(self, batch: StepBatch) -> None:
        self._ended.append(self._runner.run(batch))
        self.wake()

    def prepare(self) -> bool:
        """Does nothing: this device defers no work."""
        return False

    def take_outcomes(self) -> list[StepOutcome]:
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        self._ended = []

    def close(self) -> None: ...


class ThreadDevice:
    """A Device that runs its steps one after the other on a thread, which the constructor starts. An error outside a
    step breaks the device permanently: it runs nothing more, and `take_outcomes` and `drain` raise DEVICE_BROKEN."""

    def __init__(
        self,
        runner: Runner,
        step_timeout_s: float = STEP_TIMEOUT_S,
        drafter: Drafter | None = None,
        gate: RowGate | None = None,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._runner = StepRunner(runner, drafter, gate)
        self._clock = StepClock(step_timeout_s)
        self._launched: queue.SimpleQueue[StepBatch | threading.Event | None] = queue.SimpleQueue()
        self._ended: deque[StepOutcome] = deque()
        self._broken: Internal | None = None
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)
        self._thread.start()

    def launch(self, batch: StepBatch) -> None:
        self._clock.note_launch()
        self._launched.put(batch)

    def prepare(self) -> bool:
        """Does nothing: this device defers no work."""
        return False

    def take_outcomes(self) -> list[StepOutcome]:
        self._check()
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def drain(self) -> None:
        """Block until all launched steps have ended, and forget their outcomes. Raises DEVICE_HUNG if a step takes too
        long, DEVICE_BROKEN if the device is broken."""
        reached = threading.Event()
        self._launched.put(reached)
        self._clock.await_steps(reached)
        self._check()
        self._ended.clear()

    def close(self) -> None:
        self._launched.put(None)
        self._thread.join(CLOSE_LIMIT_S)

    def _main(self) -> None:
        """Run queued steps in order, on the device's thread, and call `wake` after each. A queued Event is set when its
        turn comes; None ends the loop. A broken device skips its steps."""
        while (item := self._launched.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._broken is None:
                self._run(item)
                self._clock.note_end()
                self.wake()

    def _run(self, batch: StepBatch) -> None:
        """Run a step and keep its outcome for `take_outcomes`. An exception is logged, and marks the device as
        broken."""
        try:
            self._ended.append(self._runner.run(batch))
        except Exception:
            log.exception("the device failed outside the model; it runs nothing more")
            self._broken = broken()

    def _check(self) -> None:
        """Raise DEVICE_BROKEN if the device is broken."""
        if self._broken is not None:
            raise self._broken


def broken() -> Internal:
    """Return the error DEVICE_BROKEN, for a device that failed outside a step: the state that it keeps of the slots can
    no longer be used."""
    return Internal(
        "DEVICE_BROKEN",
        "The device failed outside the model.",
        "The worker ends by itself; start it again, and see its log for the cause.",
    )


def hung(limit_s: float) -> Internal:
    """Return the error DEVICE_HUNG, for a device that has not finished a step or copies of KV pages within `limit_s`
    seconds; nothing can run on it any more."""
    return Internal(
        "DEVICE_HUNG",
        f"The device did not finish a step or copies of KV pages within {limit_s:g} s.",
        "The worker ends by itself; start it again, and see its log for what ran last. Where steps take that long, "
        "give the worker and its scheduler a longer --worker-timeout-s.",
    )

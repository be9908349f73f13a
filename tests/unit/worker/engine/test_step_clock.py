"""One limit for a step's time, in the worker and in its scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from quire.engine_options import stack_flags
from quire_common.errors import Internal
from quire_scheduler.config import SchedulerConfig
from quire_worker.config import WorkerConfig
from quire_worker.engine import device as device_module
from quire_worker.engine.device import StepClock, ThreadDevice
from quire_worker.replica import Replica
from tests.fakes.worker.worker_server import counting_model


class Time:
    """Monotonic seconds that pass while somebody waits for this event; `at` says what happens when."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.at: dict[float, Callable[[], None]] = {}
        self._set = False

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.wait(seconds)

    def set(self) -> None:
        self._set = True

    def wait(self, timeout_s: float) -> bool:
        until_s = self.now_s + timeout_s
        due = sorted(when_s for when_s in self.at if when_s <= until_s)
        for when_s in due:
            self.now_s = when_s
            self.at.pop(when_s)()
            if self._set:
                return True
        self.now_s = until_s
        return False


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(device_module, "time", made)
    return made


def drain(clock: StepClock, event: object) -> None:
    assert isinstance(event, Time | threading.Event)
    clock.await_steps(event)  # type: ignore[arg-type]  # Time stands for an event


def test_two_steps_in_flight_may_each_take_as_long_as_a_step_may(time: Time) -> None:
    clock = StepClock(120.0)
    clock.note_launch()
    clock.note_launch()

    def last() -> None:
        clock.note_end()
        time.set()

    time.at = {1110.0: clock.note_end, 1220.0: last}
    drain(clock, time)
    assert time.now_s == 1220.0


def test_a_step_that_takes_longer_hangs_and_the_time_before_its_run_was_over_counts(time: Time) -> None:
    clock = StepClock(120.0)
    clock.note_launch()
    time.now_s = 1118.0
    with pytest.raises(Internal, match="DEVICE_HUNG"):
        drain(clock, time)
    assert 1120.0 <= time.now_s < 1121.0


def test_a_device_that_had_nothing_to_do_for_long_does_not_hang(time: Time) -> None:
    clock = StepClock(120.0)
    clock.note_launch()
    clock.note_end()
    time.now_s = 9000.0
    time.at = {9003.0: time.set}
    drain(clock, time)
    assert time.now_s == 9003.0


def test_a_step_that_is_polled_has_the_same_limit(time: Time) -> None:
    clock = StepClock(120.0)
    clock.note_launch()
    clock.note_launch()
    time.at = {1110.0: clock.note_end}
    clock.poll(lambda: time.now_s >= 1220.0)
    assert time.now_s < 1220.1
    with pytest.raises(Internal, match="DEVICE_HUNG"):
        clock.poll(lambda: False)
    assert 1230.0 <= time.now_s < 1230.1


def test_the_worker_and_its_scheduler_have_one_limit() -> None:
    assert WorkerConfig().worker_timeout_s == SchedulerConfig().worker_timeout_s == 120.0
    flags = stack_flags({"worker_timeout_s": 7})
    assert flags["worker"]["worker-timeout-s"] == flags["scheduler"]["worker-timeout-s"] == "7"


def test_a_worker_waits_for_a_step_as_long_as_its_option_says() -> None:
    worker = Replica(WorkerConfig(model="counting", worker_timeout_s=7.0), counting_model(), lambda error: None)
    try:
        assert isinstance(worker._device, ThreadDevice)
        assert worker._device._clock._limit_s == 7.0
    finally:
        worker.close()

"""The pacer's schedule on a clock of the test's own: absolute, so that nothing adds up."""

from __future__ import annotations

from quire_worker.paced.pacer import Pacer
from tests.unit.worker_paced.driver import Row, a_runner, batch_of

MS = 1_000_000


class Clock:
    """`late_ns`: by how much each sleep oversleeps."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now_ns = 1000 * MS
        self.sleeps: list[float] = []
        self._late_ns = late_ns

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        # A nap of no length takes a microsecond.
        self.now_ns += max(round(seconds * 1e9), 1000) + self._late_ns


def test_late_wakeups_do_not_add_up_while_launches_are_ahead() -> None:
    clock = Clock(late_ns=70_000)
    begin = clock.now_ns
    formed = begin
    pacer = Pacer(clock, clock.sleep)
    for n in range(1, 1001):
        deadline = pacer.end_of_step(formed, 2 * MS)
        formed = clock.now_ns  # the next step is formed while this one runs
        pacer.wait_until(deadline)
        assert 0 <= clock.now_ns - (begin + n * 2 * MS) <= 80_000


def test_who_waits_for_an_end_pays_the_way_to_the_next_launch() -> None:
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    begin = clock.now_ns
    for n in range(1, 101):
        pacer.wait_until(pacer.end_of_step(clock.now_ns, 2 * MS))
        assert clock.now_ns == begin + n * 2 * MS + (n - 1) * 300_000
        clock.now_ns += 300_000


def test_a_step_launched_at_an_unknown_time_begins_now() -> None:
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    assert pacer.end_of_step(0, MS) == clock.now_ns + MS
    assert pacer.end_of_step(0, MS) == clock.now_ns + 2 * MS


def test_an_idle_device_does_not_save_up_time() -> None:
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    pacer.end_of_step(clock.now_ns, MS)
    clock.now_ns += 50 * MS
    assert pacer.end_of_step(clock.now_ns, MS) == clock.now_ns + MS


def test_a_deadline_that_has_passed_costs_no_sleep_and_a_near_one_only_naps() -> None:
    clock = Clock(late_ns=5_000)
    pacer = Pacer(clock, clock.sleep)
    pacer.wait_until(clock.now_ns - 1)
    assert clock.sleeps == []
    pacer.wait_until(clock.now_ns + 20_000)
    assert set(clock.sleeps) == {0.0}


def test_prefill_tokens_take_their_time() -> None:
    clock = Clock()
    runner = a_runner(step_ms=2.0, prefill_us_per_token=10.0, pacer=Pacer(clock, clock.sleep))
    begin = clock.now_ns
    rows = [Row(list(range(12)), [1, 2, 3]), Row([5, 6, 7], [4], computed=2)]
    runner.run(batch_of(rows, [12, 1], formed_ns=begin))
    assert clock.now_ns - begin == 2 * MS + 12 * 10_000

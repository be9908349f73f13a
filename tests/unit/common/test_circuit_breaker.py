"""What fails is left alone for a while, and tried again."""

from __future__ import annotations

from quire_common.circuit_breaker import CircuitBreaker


class Clock:
    """Time that passes when told."""

    def __init__(self, now_s: float = 10.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def test_some_failures_are_forgiven() -> None:
    breaker = CircuitBreaker(clock=Clock())
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.closed and breaker.can_try()


def test_after_more_there_is_a_pause_then_one_try_and_a_longer_pause() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock=clock)

    def can_try(now_s: float) -> bool:
        clock.now_s = now_s
        return breaker.can_try()

    for _ in range(3):
        breaker.failed()
    assert not breaker.closed and not can_try(10.9) and can_try(11.0)
    breaker.begin_try()
    assert not can_try(11.0), "one is enough to try it"
    clock.now_s = 11.05
    breaker.failed()
    assert not can_try(13.0) and can_try(13.1)
    clock.now_s = 20.0
    for _ in range(20):
        breaker.begin_try()
        breaker.failed()
    assert not can_try(49.0) and can_try(50.0), "the pause has an end"
    breaker.succeeded()
    assert breaker.closed
    clock.now_s = 60.0
    for _ in range(3):
        breaker.failed()
    assert can_try(61.0), "it begins anew"


def test_those_that_were_asked_before_make_the_pause_no_longer() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock=clock)
    for _ in range(10):
        breaker.failed()
    clock.now_s = 11.0
    assert breaker.can_try()


def test_one_failure_may_be_enough_and_pauses_of_one_length() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1.0, 1.0, max_failures=1, clock=clock)
    assert breaker.closed and breaker.try_now()
    assert breaker.failed() and not breaker.failed(), "news the first time"
    assert not breaker.closed and not breaker.try_now()
    clock.now_s += 1.0
    assert breaker.try_now() and not breaker.try_now(), "one probe"
    assert not breaker.failed()
    clock.now_s += 0.5
    assert not breaker.try_now()
    clock.now_s += 0.5
    assert breaker.try_now() and breaker.succeeded() and not breaker.succeeded()
    assert breaker.closed
    assert CircuitBreaker(1.0, 1.0, max_failures=1, is_open=True, clock=clock).try_now(), "the first probe is at once"

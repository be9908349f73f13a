"""Who does not answer is left alone for a while, and tried again."""

from __future__ import annotations

from quire_scheduler.kv.circuit_breaker import CircuitBreaker


def test_some_failures_are_forgiven() -> None:
    breaker = CircuitBreaker()
    for _ in range(5):
        breaker.failed(10.0)
        breaker.failed(10.0)
        breaker.worked()
    assert breaker.closed and breaker.allows(10.0)


def test_after_more_there_is_a_pause_then_one_try_and_a_longer_pause() -> None:
    breaker = CircuitBreaker()
    for _ in range(3):
        breaker.failed(10.0)
    assert not breaker.closed and not breaker.allows(10.9) and breaker.allows(11.0)
    breaker.asked(11.0)
    assert not breaker.allows(11.0), "one is enough to try it"
    breaker.failed(11.05)
    assert not breaker.allows(13.0) and breaker.allows(13.1)
    for _ in range(20):
        breaker.asked(20.0)
        breaker.failed(20.0)
    assert not breaker.allows(49.0) and breaker.allows(50.0), "the pause has an end"
    breaker.worked()
    assert breaker.closed
    for _ in range(3):
        breaker.failed(60.0)
    assert breaker.allows(61.0), "it begins anew"


def test_those_that_were_asked_before_make_the_pause_no_longer() -> None:
    breaker = CircuitBreaker()
    for _ in range(10):
        breaker.failed(10.0)
    assert breaker.allows(11.0)

"""Metrics of a process, of Redis, and of what they leave alone."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from quire_common.circuit_breaker import CircuitBreaker
from quire_common.telemetry.metrics import registry
from quire_common.telemetry.process_metrics import show_build, watch_loop_lag
from quire_common.telemetry.redis_state import note_redis


def value(name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def test_the_build_names_service_version_and_python() -> None:
    show_build("scheduler")
    builds = [s for family in registry.collect() if family.name == "quire_build_info" for s in family.samples]
    (build,) = [sample for sample in builds if sample.labels["service"] == "scheduler"]
    assert build.value == 1 and build.labels["version"][0].isdigit() and build.labels["python"].startswith("3.")


async def test_a_loop_that_is_held_up_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    name, before = "quire_event_loop_lag_seconds", value("quire_event_loop_lag_seconds_count")
    late = value(f"{name}_sum")
    watch = asyncio.ensure_future(watch_loop_lag())
    await asyncio.sleep(0)
    loop, clock = asyncio.get_running_loop(), asyncio.get_running_loop().time
    monkeypatch.setattr(loop, "time", lambda: clock() + 0.6)  # as if something had held the loop up
    while value(f"{name}_count") == before:
        await asyncio.sleep(0)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    assert value(f"{name}_sum") - late > 0.2


def test_a_named_breaker_shows_whether_it_is_open() -> None:
    breaker = CircuitBreaker(max_failures=2, name="test_calls")
    state = {"breaker": "test_calls"}
    assert registry.get_sample_value("quire_circuit_breaker_open", state) == 0
    breaker.failed()
    assert registry.get_sample_value("quire_circuit_breaker_open", state) == 0
    breaker.failed()
    assert registry.get_sample_value("quire_circuit_breaker_open", state) == 1
    breaker.succeeded()
    assert registry.get_sample_value("quire_circuit_breaker_open", state) == 0
    CircuitBreaker(is_open=True, name="test_calls")
    assert registry.get_sample_value("quire_circuit_breaker_open", state) == 1


def test_redis_is_up_as_its_last_call_says() -> None:
    note_redis("test", answered=True)
    assert value("quire_redis_up", use="test") == 1
    note_redis("test", answered=False)
    assert registry.get_sample_value("quire_redis_up", {"use": "test"}) == 0

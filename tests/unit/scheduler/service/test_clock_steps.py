"""The wall clock is set while services run: a deadline that travels as time left is no earlier and no later for it."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from quire.v1 import common_pb2
from quire_common.credit import Start, decode_grant, encode_grant
from quire_common.errors import DeadlineExceeded
from quire_common.sequence import RequestContext, context_from_pb, context_to_pb
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.service.clock import now_s
from quire_scheduler.service.engine import Engine
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.worker.fake_worker import make_hello

HOUR_S = 3600.0
STEPS_S = [-HOUR_S, -1.0, 0.0, HOUR_S]


class OutputSink:
    def deliver(self, _outputs: Any) -> bool:
        return True

    def beat(self) -> None:
        """Nothing."""


def step_wall_clock(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)


async def expect_deadline_in_30_s(message: common_pb2.RequestContext) -> None:
    """Submit a request whose context is the message; it must end between 29 and 31 s from now."""
    engine = Engine(SchedulerConfig())
    engine.attach(make_hello())
    core = engine.core
    assert core is not None
    session = engine.open_session(OutputSink())
    engine.submit(session, 1, context_from_pb(message), a_sequence(4, 100))
    core.expire(now_s() + 29.0)
    assert core.count(session) == 1, "it ended early"
    core.expire(now_s() + 31.0)
    assert core.count(session) == 0, "it ended late"
    await asyncio.wait_for(engine.close(), 5)


@pytest.mark.parametrize("step_s", STEPS_S)
async def test_deadline_does_not_depend_on_clock_steps(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    message = context_to_pb(RequestContext("r", deadline_s=time.monotonic() + 30.0))
    # The router and the scheduler disagree on the time of day, or one of them was set meanwhile.
    step_wall_clock(monkeypatch, step_s)
    await expect_deadline_in_30_s(message)


@pytest.mark.parametrize("step_s", STEPS_S)
async def test_wall_time_of_an_older_router_still_is_a_deadline(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    step_wall_clock(monkeypatch, step_s)
    await expect_deadline_in_30_s(
        common_pb2.RequestContext(request_id="r", deadline_unix_ms=int((time.time() + 30.0) * 1000))
    )


def test_time_left_precedes_wall_time() -> None:
    message = common_pb2.RequestContext(request_id="r", deadline_unix_ms=1, time_left_ms=30_000)
    assert 29.0 < context_from_pb(message).deadline_s - time.monotonic() <= 30.0


async def test_deadline_that_has_passed_is_refused() -> None:
    engine = Engine(SchedulerConfig())
    engine.attach(make_hello())
    session = engine.open_session(OutputSink())
    message = context_to_pb(RequestContext("r", deadline_s=time.monotonic() - 1.0))
    assert message.HasField("time_left_ms") and message.time_left_ms == 0
    with pytest.raises(DeadlineExceeded):
        engine.submit(session, 1, context_from_pb(message), a_sequence(4, 100))
    await asyncio.wait_for(engine.close(), 5)


def test_no_deadline_stays_none() -> None:
    message = context_to_pb(RequestContext("r"))
    assert not message.HasField("time_left_ms")
    assert context_from_pb(message).deadline_s == math.inf


def test_each_hop_sends_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    context = RequestContext("r", deadline_s=time.monotonic() + 30.0)
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 12.0)  # it waited so long in a queue
    assert 17_000 < context_to_pb(context).time_left_ms <= 18_000
    monkeypatch.setattr(time, "monotonic", lambda: real() + 1e9)
    assert context_to_pb(context).time_left_ms == 0


def test_worker_gets_the_time_left() -> None:
    rig = Rig()
    rig.now = time.monotonic()
    rig.submit(1, a_sequence(4, 10), deadline_s=rig.now + 30.0)
    grant = rig.core.next_grant(rig.now)
    assert grant is not None
    (start,) = decode_grant(encode_grant(grant)).start
    assert isinstance(start, Start)
    assert 29.0 < start.context.deadline_s - time.monotonic() <= 30.0

"""The wall clock is set while a scheduler runs: what a router that follows it asks for is no earlier and no later."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from quire_common.errors import DeadlineExceeded
from quire_common.sequence import RequestContext
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.service.clock import now_s
from quire_scheduler.service.engine import Engine
from tests.fakes.fake_worker import make_hello
from tests.fakes.scheduler_rig import a_sequence

HOUR_S = 3600.0


class OutputSink:
    def deliver(self, _outputs: Any) -> bool:
        return True

    def beat(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("step_s", [-HOUR_S, -1.0, 0.0, HOUR_S])
async def test_deadline_does_not_depend_on_clock_steps(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    engine = Engine(SchedulerConfig())
    engine.attach(make_hello())
    core = engine.core
    assert core is not None
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    session = engine.open_session(OutputSink())
    soon = RequestContext("r", deadline_unix_ms=int((time.time() + 30.0) * 1000))
    engine.submit(session, 1, soon, a_sequence(4, 100))
    core.expire(now_s() + 29.0)
    assert core.count(session) == 1, "it ended early"
    core.expire(now_s() + 31.0)
    assert core.count(session) == 0, "it ended late"
    gone = RequestContext("r", deadline_unix_ms=int((time.time() - 1.0) * 1000))
    with pytest.raises(DeadlineExceeded):
        engine.submit(session, 2, gone, a_sequence(4, 100))
    await asyncio.wait_for(engine.close(), 5)

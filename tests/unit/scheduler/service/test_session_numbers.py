"""Numbers of sessions: each call of GenerateTokens takes one, and columns of int32 carry them."""

from __future__ import annotations

from typing import Any

from quire_common.sequence import RequestContext
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.service.engine import Engine
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello


class OutputSink:
    def __init__(self) -> None:
        self.tokens = 0

    def deliver(self, outputs: Any) -> bool:
        self.tokens += len(outputs.token)
        return True

    def beat(self) -> None:
        """Nothing."""


def test_session_numbers_wrap_and_skip_open_sessions() -> None:
    engine = Engine(SchedulerConfig())
    worker = FakeWorker(make_hello())
    engine.attach(worker.hello)
    first, sinks = engine.open_session(OutputSink()), [OutputSink() for _ in range(4)]
    engine._next_session = 2**31 - 2
    sessions = [engine.open_session(sink) for sink in sinks]
    assert len({first, *sessions}) == 5
    assert all(0 < session < 2**31 for session in sessions)
    for session in sessions:
        engine.submit(session, 1, RequestContext(f"r{session}"), a_sequence(5, 3))
    for _ in range(30):
        while (grant := engine.next_grant()) is not None:
            worker.deliver(grant)
        report = worker.step()
        if report is not None:
            engine.on_report(report)
        engine.flush()
    assert [sink.tokens for sink in sinks] == [3] * 4

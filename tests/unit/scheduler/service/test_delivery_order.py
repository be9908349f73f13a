"""The order in which the scheduler sends Grants, delivers outputs, ends sessions and updates metrics."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quire_common.credit import Epoch, Grant
from quire_common.sequence import RequestContext
from quire_scheduler import metrics
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.service.engine import Engine
from quire_scheduler.service.worker_link import WorkerLink
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello


async def test_end_of_a_session_cannot_overtake_outputs_that_a_kick_delivers() -> None:
    """`Session.deliver` schedules the check whether the session is over behind the kick of its last requests."""
    order, grants = list[str](), [Grant(Epoch(1, 1), 1)]
    engine: Any = SimpleNamespace(
        call_for_grants=lambda _: None,
        next_grant=lambda: grants.pop() if grants else None,
        flush=lambda: order.append("outputs"),
    )
    link = WorkerLink(SchedulerConfig(), engine)
    link._call = object()
    link._kick()
    asyncio.get_running_loop().call_soon(order.append, "check")
    await asyncio.sleep(0)
    assert order == ["outputs", "check"] and not grants
    await link.close()


async def test_worker_is_given_up_if_outputs_cannot_be_delivered() -> None:
    engine: Any = SimpleNamespace(call_for_grants=lambda _: None, next_grant=lambda: None, flush=lambda: 1 / 0)
    link = WorkerLink(SchedulerConfig(), engine)
    cancelled = asyncio.Event()
    link._call = SimpleNamespace(cancel=cancelled.set)
    link._kick()
    await asyncio.wait_for(cancelled.wait(), 5)
    assert link._gave_up
    await link.close()


def test_ended_requests_enter_the_metrics_after_their_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()
    monkeypatch.setattr(metrics, "ended", lambda request, reason: order.append(f"metrics {reason}"))
    engine, worker = Engine(SchedulerConfig()), FakeWorker(make_hello())
    engine.attach(worker.hello)

    def deliver(outputs: Any) -> bool:
        order.extend("outputs" for _ in outputs.finished)
        return True

    sink: Any = SimpleNamespace(deliver=deliver, beat=lambda: None)
    session = engine.open_session(sink)
    engine.submit(session, 1, RequestContext("r"), a_sequence(5, 3))
    engine.abort(session, [1])
    engine.flush()
    engine.flush()
    assert order == ["outputs", "metrics abort"]


async def test_requests_that_engine_close_ends_enter_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = list[str]()
    monkeypatch.setattr(metrics, "ended", lambda request, reason: reasons.append(reason))
    engine = Engine(SchedulerConfig())
    engine.attach(make_hello())
    engine.submit(1, 1, RequestContext("r"), a_sequence(5, 3))
    await engine.close()
    assert reasons == ["error"]

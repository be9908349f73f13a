"""A scheduler whose worker is lost, hangs or confuses it: requests end by a typed error, and the service comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.v1 import scheduler_pb2
from quire_common.credit import encode_grant
from quire_common.errors import QuireError
from quire_scheduler.service import worker_link
from tests.fakes.call_writers import call_writers
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.scheduler.scheduler_stack import Router, Stack, assert_serves, stack
from tests.fakes.worker.fake_worker import undisturbed


def assert_logged_silence(caplog: pytest.LogCaptureFixture, s: Stack, lacks: str) -> None:
    line = next(record for record in caplog.records if record.getMessage() == "the worker does not answer")
    fields = line.fields  # type: ignore[attr-defined]  # set by quire_common.telemetry.logs
    assert fields["worker"] == s.worker.address
    assert lacks in fields["error"] and "restart the worker" in fields["fix"]


async def first_lost_next_served(s: Stack, router: Router) -> None:
    await router.submit({1: a_sequence(4, 4)})
    await router.done(1)
    assert router.failed[1].code == "WORKER_LOST"
    await s.until(lambda: s.core is not None)
    await router.submit({2: a_sequence(4, 4)})
    await router.done(2)
    assert router.tokens[2] == undisturbed(a_sequence(4, 4))[0]


async def test_a_lost_worker_fails_its_requests_and_comes_back() -> None:
    async with stack(max_model_len=256) as s:
        s.worker.step_s = 0.002
        router = Router(s)
        await router.open()
        await router.submit({h: a_sequence(8, 200) for h in range(8)})
        await router.until(lambda: len(router.tokens) >= 4)
        address = s.worker.address
        await s.worker.stop()
        await router.done(*range(8))
        assert {(e.code, e.http_status) for e in router.failed.values()} == {("WORKER_LOST", 503)}
        await router.submit({20: a_sequence(4, 4)})
        await router.done(20)
        assert router.failed[20].code == "WORKER_NOT_READY"
        await s.worker.start(address)
        await s.until(lambda: s.core is not None)
        await router.submit({21: a_sequence(4, 4)})
        await router.done(21)
        assert router.tokens[21] == undisturbed(a_sequence(4, 4))[0]
        info = await s.stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest())
        assert info.epoch.run > 1


async def test_hung_worker_is_given_up() -> None:
    async with stack(worker_timeout_s=0.3) as s:
        s.worker.answering.clear()
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(4, 4)})
        await router.done(1)
        assert router.failed[1].code == "WORKER_LOST"
        s.worker.answering.set()


@pytest.mark.parametrize(
    ("event", "count", "first_message"),
    [("greets", "ungreeted", "hello"), ("tells_progress", "untold", "loading progress")],
    ids=["hello", "loading progress"],
)
async def test_worker_that_sends_no_first_message_is_asked_again(
    event: str, count: str, first_message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack(ready=False, prepare=lambda w: getattr(w, event).clear(), worker_timeout_s=0.3) as s:
        await s.until(lambda: getattr(s.worker, count) >= 2)
        assert s.core is None and f"it took the stream, but sent no {first_message} in 0.9 s" in s.engine.detail
        assert_logged_silence(caplog, s, f"no {first_message} in 0.9 s")
        getattr(s.worker, event).set()
        await assert_serves(s)


async def test_worker_whose_first_frame_is_no_hello_is_asked_again() -> None:
    """Although the worker keeps the stream open."""
    async with stack(ready=False, prepare=lambda w: setattr(w, "misgreets", True)) as s:
        await s.until(lambda: s.worker.misgreeted >= 2)
        assert s.core is None and "it sent no hello" in s.engine.detail
        s.worker.misgreets = False
        await assert_serves(s)


async def test_load_that_is_silent_between_two_messages_goes_on() -> None:
    """A shard of weights may take longer than a step."""
    async with stack(ready=False, prepare=lambda w: w.may_load.clear(), worker_timeout_s=0.1) as s:
        await s.until(lambda: s.engine.phase == "loading" and "model.safetensors" in s.engine.detail)
        await asyncio.sleep(0.5)
        assert "model.safetensors" in s.engine.detail
        s.worker.may_load.set()
        await s.until(lambda: s.core is not None)


async def test_a_report_that_answers_no_grant_does_not_hide_a_hang() -> None:
    async with stack(worker_timeout_s=0.3) as s:
        s.worker.answering.clear()
        s.worker.interrupting = True
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(4, 4)})
        async with asyncio.timeout(20):
            await router.done(1)
        assert router.failed[1].code == "WORKER_LOST"
        s.worker.answering.set()


async def test_broken_worker_link_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than a scheduler that never attaches again, and requests that nobody ends."""
    async with stack() as s:
        ended: list[QuireError] = []
        monkeypatch.setattr(s.service, "_fail", ended.append)

        def broken(error: QuireError, now: float) -> None:
            raise AssertionError("the core contradicts itself")

        monkeypatch.setattr(s.core, "worker_lost", broken)
        await s.worker.stop()
        await s.until(lambda: bool(ended))
        assert ended[0].code == "INTERNAL"


async def test_failing_core_costs_its_epoch_not_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack() as s:
        router = Router(s)
        await router.open()

        def broken(now: float) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(s.core, "next_grant", broken)
        await first_lost_next_served(s, router)


async def test_lost_worker_leaves_no_writer_thread() -> None:
    async with stack() as s:
        address = s.worker.address
        assert call_writers() == 1
        await s.worker.stop()
        await s.until(lambda: call_writers() == 0)
        await s.worker.start(address)
        await s.until(lambda: s.core is not None)
        assert call_writers() == 1


async def test_unsendable_grant_costs_its_epoch_not_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [object()]

    def encode_some(grant: Any) -> Any:
        return bad.pop() if bad else encode_grant(grant)

    async with stack() as s:
        monkeypatch.setattr(worker_link, "encode_grant", encode_some)
        router = Router(s)
        await router.open()
        await first_lost_next_served(s, router)

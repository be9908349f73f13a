"""Silence means death, in both directions: heartbeats of worker and session, and whose worker it is."""

from __future__ import annotations

import asyncio
import time

import pytest

from quire.v1 import scheduler_pb2
from quire_common.credit import Epoch, Report
from quire_common.errors import Internal
from quire_scheduler.service.liveness_monitor import LivenessMonitor
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.scheduler.scheduler_stack import Router, assert_serves, scheduler_of, stack
from tests.fakes.worker.fake_worker import undisturbed

# What is noticed, or said, after a second or less; else it never is.
LATE_S = 30.0


async def test_silent_worker_is_lost_after_its_heartbeat_time() -> None:
    async with stack(worker_heartbeat_s=1.0, max_model_len=256) as s:
        s.worker.step_s = 0.005
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(4, 240), 2: a_sequence(4, 240)})
        await router.until(lambda: len(router.tokens) == 2)
        s.worker.beating.clear()
        began = time.monotonic()
        await router.done(1, 2)
        assert 0.5 < time.monotonic() - began < LATE_S
        assert {(e.code, e.http_status) for e in router.failed.values()} == {("WORKER_LOST", 503)}
        s.worker.beating.set()
        await s.until(lambda: s.core is not None)
        await router.submit({3: a_sequence(4, 4)})
        await router.done(3)
        assert router.tokens[3] == undisturbed(a_sequence(4, 4))[0]
        await s.until_quiet()


async def test_idle_worker_with_heartbeats_is_kept() -> None:
    async with stack(worker_heartbeat_s=1.0, worker_timeout_s=1.0) as s:
        await asyncio.sleep(2.5)
        assert s.worker.runs == 1 and s.engine.phase == "ready"


async def test_worker_with_heartbeats_but_no_progress_is_given_up() -> None:
    """All its Grants are answered and it has credit left: nothing but steps is missing."""
    async with stack(worker_timeout_s=1.0, max_model_len=256) as s:
        s.worker.step_s = 0.01
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(4, 240)})
        await router.until(lambda: len(router.tokens.get(1, ())) > 3)
        s.worker.answering.clear()
        await router.done(1)
        assert router.failed[1].code == "WORKER_LOST"
        s.worker.answering.set()


def test_monitor_blames_no_worker_for_a_scheduler_that_did_not_listen() -> None:
    monitor = LivenessMonitor(2.0, 10.0, 100.0)
    monitor.grant_sent(1)
    assert monitor.failure(101.9, busy=True) == ""
    assert monitor.failure(102.1, busy=True) == "it is silent"
    monitor.restart(130.0)
    assert monitor.failure(131.0, busy=True) == ""
    for second in range(131, 140):
        monitor.frame_received(float(second), 0, heartbeat=True)
    assert monitor.failure(140.1, busy=False) == "it hangs", "the Grant waits still, and heartbeats are no answer"
    monitor.frame_received(140.2, 1, heartbeat=False)
    assert monitor.failure(141.0, busy=False) == ""
    for second in range(141, 160):
        monitor.frame_received(float(second), 1, heartbeat=True)
        assert monitor.failure(float(second), busy=False) == "", "an idle worker owes nothing"
    monitor.grant_sent(2)
    assert monitor.failure(160.0, busy=True) == ""


async def test_idle_session_sends_heartbeats() -> None:
    async with stack() as s:
        router = Router(s)
        welcome = await router.open()
        assert welcome.heartbeat_ms == 500
        await router.until(lambda: router.beats >= 5)
        assert router.silence_s < LATE_S
        await router.submit({1: a_sequence(4, 4)})
        await router.done(1)
        assert router.tokens[1] == undisturbed(a_sequence(4, 4))[0]


async def test_session_without_a_worker_sends_heartbeats_and_refuses() -> None:
    async with stack(ready=False, prepare=lambda w: w.may_load.clear()) as s:
        router = Router(s)
        welcome = await router.open()
        assert not welcome.HasField("epoch") and welcome.heartbeat_ms == 500
        await router.submit({1: a_sequence(4, 4)})
        await router.done(1)
        assert (router.failed[1].code, router.failed[1].http_status) == ("WORKER_NOT_READY", 503)
        await router.until(lambda: router.beats >= 2)
        s.worker.may_load.set()
        await s.until(lambda: s.core is not None)
        await router.submit({2: a_sequence(4, 4)})
        await router.done(2)
        assert router.tokens[2] == undisturbed(a_sequence(4, 4))[0]


async def test_draining_worker_gets_no_new_requests() -> None:
    async with stack(max_model_len=256) as s:
        s.worker.step_s = 0.005
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(4, 100)})
        await router.until(lambda: 1 in router.tokens)
        watch = s.stub.WatchLoad(scheduler_pb2.WatchLoadRequest(interval_ms=60_000))
        assert (await watch.read()).phase == "ready"
        s.worker.draining = True
        async with asyncio.timeout(LATE_S):
            while (await watch.read()).phase != "draining":
                pass
        watch.cancel()
        await router.submit({2: a_sequence(4, 4)})
        await router.done(1, 2)
        assert (router.failed[2].code, router.failed[2].http_status) == ("DRAINING", 503)
        assert router.tokens[1] == undisturbed(a_sequence(4, 100))[0]
        await s.until_quiet()
        # Its successor is another epoch.
        address, s.worker.draining = s.worker.address, False
        await s.worker.stop()
        await s.until(lambda: s.core is None)
        await s.worker.start(address)
        await s.until(lambda: s.engine.phase == "ready")
        await router.submit({3: a_sequence(4, 4)})
        await router.done(3)
        assert router.tokens[3] == undisturbed(a_sequence(4, 4))[0]


async def test_newest_scheduler_takes_the_worker_over() -> None:
    async with stack(max_model_len=256) as old:
        old.worker.step_s = 0.005
        first = Router(old)
        await first.open()
        await first.submit({1: a_sequence(4, 240)})
        await first.until(lambda: 1 in first.tokens)
        async with scheduler_of(old.worker) as new:
            await first.done(1)
            assert first.failed[1].code == "WORKER_LOST"
            assert old.engine.phase == "failed" and "SCHEDULER_REPLACED" in old.engine.detail
            second = Router(new)
            await second.open()
            await second.submit({1: a_sequence(4, 200)})
            await second.done(1)
            assert second.tokens[1] == undisturbed(a_sequence(4, 200))[0], "nobody took the worker back meanwhile"
            await new.until_quiet()
        await old.until(lambda: old.core is not None)
        await first.submit({2: a_sequence(4, 4)})
        await first.done(2)
        assert first.tokens[2] == undisturbed(a_sequence(4, 4))[0]


async def test_scheduler_returns_when_its_successor_left_at_once() -> None:
    async with stack(max_model_len=256) as old:
        old.worker.may_tell.clear()
        async with scheduler_of(old.worker):
            await old.until(lambda: old.worker.asked > 0)
            assert old.core is None and "SCHEDULER_REPLACED" in old.engine.detail
        await old.until(lambda: not old.worker.attached)
        old.worker.may_tell.set()
        await assert_serves(old)


async def test_scheduler_stands_aside_while_the_workers_epoch_changes() -> None:
    """As seen early in a takeover: the one before is told at once, the next epoch begins when its steps have ended."""
    async with stack(max_model_len=256) as old, scheduler_of(old.worker):
        await old.until(lambda: old.worker.asked > 0)
        runs, asked = old.worker.runs, old.worker.asked
        old.worker.told_epoch = Epoch(7, 99)
        await old.until(lambda: old.worker.asked >= asked + 2)
        assert old.worker.runs == runs and old.core is None


async def test_frames_of_another_epoch_are_dropped() -> None:
    async with stack(max_model_len=256) as s:
        s.worker.step_s = 0.002
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(4, 100)})
        await router.until(lambda: 1 in router.tokens)
        for run in (0, 2, 99):
            stray = Report(Epoch(7, run), retired=10**6, draining=True, error=[(0, Internal("X", "stray", ""))])
            s.worker.extra.append(stray)
        await router.done(1)
        assert not s.worker.extra
        assert router.tokens[1] == undisturbed(a_sequence(4, 100))[0]
        assert s.engine.phase == "ready"
        await s.until_quiet()


@pytest.mark.parametrize("left_ms", [100, 400])
async def test_requests_cut_short_by_a_drain_can_be_resumed(left_ms: int) -> None:
    async with stack(max_model_len=256, seqs=2) as s:
        s.worker.step_s = 0.02
        router = Router(s)
        await router.open()
        await router.submit({handle: a_sequence(4, 240) for handle in range(5)})
        await router.until(lambda: len(router.tokens) >= 2)
        await s.service.drain(left_ms / 1000)
        await router.done(*range(5))
        assert {(e.code, e.http_status) for e in router.failed.values()} == {("DRAINING", 503)}
        for handle, tokens in router.tokens.items():
            assert tokens == undisturbed(a_sequence(4, 240))[0][: len(tokens)], handle
        await s.until_quiet()

"""Requests without an engine wait for one, for a limited time, or fail at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from quire.v1 import common_pb2 as pb
from quire_common.discovery import Endpoint
from quire_router import metrics
from quire_router.replicas import migration
from quire_router.replicas.session_outgoing import SessionOutgoing
from quire_router.sequences.sequence_state import SequenceState
from tests.fakes.grpc_host import GrpcHost
from tests.fakes.router.router_faults import (
    PROMPT,
    endpoints,
    held,
    inside,
    joined,
    nothing_left,
    pair,
    release,
    running,
    submits,
    text,
    until,
)
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler


async def test_client_disconnect_removes_its_waiting_request() -> None:
    async with router_rig() as rig:
        async with held(rig, 5, n=2):
            rig.router.fleet.update([])
            await until(lambda: len(rig.router.waiting) == 2)
        await until(lambda: not rig.router.waiting and rig.router.admission.inside == 0)
        release(rig)
        rig.router.fleet.update(endpoints(rig))
        await until(lambda: rig.router.fleet.ready)
        assert (await rig.complete("abc", max_tokens=3)).json()["choices"][0]["text"] == "abc"
        assert len(rig.scheduler.submits) == 3  # two, and the new one
        await until(lambda: nothing_left(rig))


async def test_request_timeout_ends_the_wait_for_an_engine() -> None:
    async with router_rig(request_timeout_s=3.0) as rig:
        async with held(rig, 5) as rest:
            rig.router.fleet.update([])
            chunks = await rest()
        assert chunks[-1]["error"]["code"] == "REQUEST_TIMEOUT"
        assert not rig.router.waiting
        new = await rig.complete("abc", timeout_s=0.3)
        assert new.status_code == 504 and new.json()["error"]["code"] == "REQUEST_TIMEOUT"


async def test_request_fails_after_migration_wait_s_without_an_engine() -> None:
    async with router_rig(migration_wait_s=0.2) as rig:
        async with held(rig, 5) as rest:
            rig.router.fleet.update([])
            new = await rig.complete("abc")
            assert new.status_code == 503 and new.json()["error"]["code"] == "NO_HEALTHY_REPLICA"
            assert new.headers["retry-after"]
            chunks = await rest()
        assert chunks[-1]["error"]["code"] == "NO_HEALTHY_REPLICA"
        assert not rig.router.waiting and rig.router.admission.inside == 0


async def test_requests_wait_for_returning_replicas_and_complete() -> None:
    """What runs waits, what is new waits too, and all get what they would have got."""
    async with router_rig(pair(step_s=0.002)) as rig:
        async with held(rig, 15) as rest:
            for host in rig.scheduler_hosts:
                await host.stop()
            await until(lambda: len(rig.router.waiting) == 1)
            assert (await rig.http.get("/health")).status_code == 503
            new = asyncio.ensure_future(rig.complete(PROMPT, max_tokens=20))
            await until(lambda: len(rig.router.waiting) == 2)
            release(rig)
            await rig.scheduler_hosts[1].start()
            chunks = await rest()
        assert joined(chunks) == text(200)
        assert (await new).json()["choices"][0]["text"] == text(20)
        attempts = {s.sequence.stop.max_tokens: s.context.attempt for s in submits(rig)}
        assert attempts[20] == 0 < attempts[200]  # waiting alone is no attempt


async def test_request_may_resume_on_the_same_replica() -> None:
    async with router_rig([FakeScheduler(step_s=0.002)]) as rig:
        rig.scheduler.breaks = [7]
        answer = await rig.complete(PROMPT, max_tokens=60)
        assert answer.json()["choices"][0]["text"] == text(60)
        assert [s.context.attempt for s in rig.scheduler.submits] == [0, 1]


async def test_request_resumes_only_on_the_same_weights() -> None:
    other = FakeScheduler(digest=b"other weights")
    async with router_rig([FakeScheduler(step_s=0.002)]) as rig, GrpcHost(other.add) as host:
        async with held(rig, 5) as rest:
            stranger = Endpoint(host.address, "scheduler", host.address)
            rig.router.fleet.update([stranger])
            await until(lambda: rig.router.fleet.ready)
            assert len(rig.router.waiting) == 1 and not other.submits
            release(rig)
            rig.router.fleet.update([stranger, *endpoints(rig)])
            chunks = await rest()
        assert joined(chunks) == text(200) and not other.submits
        # What has no token yet may start anywhere that serves the name.
        rig.scheduler.gate.clear()
        other.gate.clear()
        waiting = [asyncio.ensure_future(rig.complete("abc", max_tokens=3)) for _ in range(2)]
        await until(lambda: bool(rig.scheduler.running) and bool(other.running))
        other.gate.set()
        rig.scheduler.break_sessions()
        assert [(await w).json()["choices"][0]["text"] for w in waiting] == ["abc", "abc"]


async def test_request_fails_after_migration_limit_engine_failures() -> None:
    async with router_rig(pair(), migration_limit=3) as rig:
        for fake in rig.schedulers:
            fake.gate.clear()
        waiting = asyncio.ensure_future(rig.complete("abc"))
        for attempt in range(3):
            await until(lambda attempt=attempt: len(submits(rig)) > attempt)  # type: ignore[misc]  # a default
            running(rig).admit_all()
            await until(lambda: any(sequence.admitted for sequence in inside(rig)))
            running(rig).break_sessions()
        failed = await waiting
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "MIGRATION_LIMIT"
        assert len(submits(rig)) == 3
        await until(lambda: nothing_left(rig))


@pytest.mark.parametrize("began_anew", [False, True])
async def test_unreachable_engines_count_only_if_they_restarted(began_anew: bool) -> None:
    fakes = pair(heartbeat_ms=50)
    for fake in fakes:
        fake.gate.clear()
        fake.rates = {"epoch": pb.Epoch(boot_id=7, run=1)}
    async with router_rig(fakes, migration_limit=2, replica_timeout_s=0.3) as rig:
        waiting = asyncio.ensure_future(rig.complete("abc", max_tokens=3))
        for attempt in range(2 if began_anew else 6):
            await until(lambda attempt=attempt: len(submits(rig)) > attempt)  # type: ignore[misc]  # a default
            fake = running(rig)
            fake.admit_all()
            await until(lambda: any(sequence.admitted for sequence in inside(rig)))
            fake.hang()
            await until(lambda: not inside(rig) or not any(sequence.admitted for sequence in inside(rig)))
            if began_anew:
                fake.rates = {"epoch": pb.Epoch(boot_id=7, run=2)}
                fake.report()
            fake.awake.set()
            await until(lambda: all(replica.accepts for replica in rig.router.fleet.replicas.values()))
        release(rig)
        answer = await waiting
        if began_anew:
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "MIGRATION_LIMIT"
        else:
            assert answer.json()["choices"][0]["text"] == "abc"
        await until(lambda: nothing_left(rig))


async def test_failures_before_admission_do_not_count() -> None:
    async with router_rig(pair(), migration_limit=1) as rig:
        waiting = await break_before_admission(rig, 5)
        release(rig)
        assert (await waiting).json()["choices"][0]["text"] == "abc"


async def test_ten_failures_before_admission_fail_the_request() -> None:
    async with router_rig(pair(), migration_limit=1) as rig:
        failed = await (await break_before_admission(rig, 10))
        error = failed.json()["error"]
        assert (failed.status_code, error["code"]) == (500, "MIGRATION_LIMIT") and "queues" in error["message"]
        assert len(submits(rig)) == 10
        await until(lambda: nothing_left(rig))


async def break_before_admission(rig: RouterRig, times: int) -> asyncio.Future[Any]:
    """A request whose engines break so many times, each while it waits in its queue."""
    for fake in rig.schedulers:
        fake.gate.clear()
    waiting = asyncio.ensure_future(rig.complete("abc", max_tokens=3))
    for attempt in range(times):
        await until(lambda attempt=attempt: len(submits(rig)) > attempt)  # type: ignore[misc]  # a default
        running(rig).break_sessions()
    return waiting


async def test_error_of_the_last_engine_is_returned() -> None:
    async with router_rig(pair(), migration_limit=3) as rig:
        for fake in rig.schedulers:
            fake.refuse = refusal("NAN_LOGITS", grpc.StatusCode.INTERNAL)
        failed = await rig.complete("abc")
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "NAN_LOGITS"
        assert [len(fake.submits) for fake in rig.schedulers] in ([1, 2], [2, 1])
        await until(lambda: nothing_left(rig))


async def test_progress_resets_the_failure_count() -> None:
    async with router_rig(pair(step_s=0.001), migration_limit=2) as rig:
        for fake in rig.schedulers:
            fake.breaks = [5] * 20
        answer = await rig.complete(PROMPT, max_tokens=60)
        assert answer.json()["choices"][0]["text"] == text(60)
        assert len(submits(rig)) == 12


@pytest.mark.deep
@pytest.mark.parametrize("code", ["DRAINING", "WORKER_NOT_READY"])
async def test_refused_request_is_retried_without_counting_as_migration(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    log = SimpleNamespace(
        warning=lambda event, **_: told.append(event), info=lambda *_, **__: None, debug=lambda *_, **__: None
    )
    monkeypatch.setattr(migration, "log", log)
    async with router_rig(pair(), migration_limit=1) as rig:
        before = history()
        for fake in rig.schedulers:
            fake.refuse = refusal(code, grpc.StatusCode.UNAVAILABLE)
        waiting = asyncio.ensure_future(rig.complete("abc", max_tokens=3))
        await until(lambda: len(submits(rig)) > 4)
        rig.schedulers[1].refuse = None
        assert (await waiting).json()["choices"][0]["text"] == "abc"
        assert (history(), told) == (before, [])
        # What has begun was lost to it.
        async with held(rig, 5) as rest:
            rig.schedulers[0].refuse = None
            rig.schedulers[1].fail_all(code)
            await until(lambda: bool(told))
            release(rig)
            assert joined(await rest()) == text(200)
        assert (history(), told) == (before + 1, ["sequence lost its engine"])


def history() -> float:
    return sum(s.value for m in metrics.migrations.collect() for s in m.samples if s.name.endswith("_total"))


async def test_full_replicas_refuse_new_requests_while_migrated_ones_wait() -> None:
    async with router_rig(pair(step_s=0.002)) as rig:
        full = refusal("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
        async with held(rig, 5) as rest:
            first = running(rig)
            (other,) = [fake for fake in rig.schedulers if fake is not first]
            first.refuse = other.refuse = full
            new = await rig.complete("abc")
            assert new.status_code == 429 and new.headers["retry-after"] == "7"
            assert len(first.submits) + len(other.submits) == 3  # both were asked
            other.refuse = None
            assert (await elsewhere(rig, other)).status_code == 200
            other.refuse = full
            first.break_sessions()
            await until(lambda: len(rig.router.waiting) == 1)
            other.refuse = None
            release(rig)
            chunks = await rest()
        assert joined(chunks) == text(200)


async def elsewhere(rig: RouterRig, taker: FakeScheduler) -> Any:
    taker.gate.set()
    return await rig.complete("abc", max_tokens=3)


def refusal(code: str, status: grpc.StatusCode) -> pb.RequestError:
    return pb.RequestError(code=code, message="m", fix="f", grpc_code=status.value[0], retry_after_s=7)


async def test_client_errors_are_not_retried() -> None:
    async with router_rig(pair()) as rig:
        for fake in rig.schedulers:
            fake.refuse = refusal("PROMPT_TOO_LONG", grpc.StatusCode.INVALID_ARGUMENT)
        refused = await rig.complete("abc")
        assert refused.status_code == 400 and len(submits(rig)) == 1


async def test_silence_counts_only_with_promised_heartbeats() -> None:
    async with router_rig(replica_timeout_s=0.2) as rig:
        rig.scheduler.gate.clear()
        waiting = asyncio.ensure_future(rig.complete("abc", max_tokens=3))
        await until(lambda: bool(rig.scheduler.running))
        await asyncio.sleep(0.6)  # what is asserted is that nothing happens
        rig.scheduler.gate.set()
        assert (await waiting).status_code == 200 and rig.scheduler.sessions == 1


async def test_idle_scheduler_stays_ready_and_a_hanging_one_does_not() -> None:
    async with router_rig([FakeScheduler(heartbeat_ms=100)], replica_timeout_s=0.4) as rig:
        await asyncio.sleep(1.0)  # what is asserted is that nothing happens
        assert rig.scheduler.sessions == 1 and rig.router.fleet.ready
        rig.scheduler.hang()
        await until(lambda: not rig.router.fleet.ready)
        rig.scheduler.awake.set()
        await until(lambda: rig.router.fleet.ready and rig.scheduler.sessions == 2)


async def test_unencodable_request_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    to_submit = SequenceState.to_submit

    def broken(sequence: SequenceState) -> Any:
        if sequence.context.request_id == "broken":
            raise ValueError("cannot be made")
        return to_submit(sequence)

    monkeypatch.setattr(SequenceState, "to_submit", broken)
    async with router_rig([FakeScheduler(step_s=0.002)]) as rig, held(rig, 10) as rest:
        assert (await rig.complete("abc", request_id="broken")).json()["error"]["code"] == "INTERNAL"
        release(rig)
        assert joined(await rest()) == text(200)
        assert len(rig.scheduler.submits) == rig.scheduler.sessions == 1
        await until(lambda: nothing_left(rig))


async def test_session_ended_by_grpc_is_reopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what it does when the messages of a stream cannot be made; nobody has cancelled the session."""
    async with router_rig([FakeScheduler(step_s=0.002)]) as rig, held(rig, 10) as rest:
        with monkeypatch.context() as patch:
            patch.setattr(SessionOutgoing, "_next", lambda self: 1 / 0)
            new = asyncio.ensure_future(rig.complete("abc", max_tokens=3))
            await until(lambda: not rig.router.fleet.ready)
        release(rig)
        assert joined(await rest()) == text(200)
        assert (await new).json()["choices"][0]["text"] == "abc"
        assert rig.scheduler.sessions == 2

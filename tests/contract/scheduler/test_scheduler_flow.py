"""Queues are bounded: a router that does not read loses its session, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import pytest

from quire.v1 import scheduler_pb2
from quire_common.columns import i32
from quire_common.errors import from_rpc_error
from quire_common.sequence import sequence_to_pb
from quire_router.config import RouterConfig
from quire_router.replicas.scheduler_client import SchedulerClient
from quire_scheduler.service.session import Session
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.scheduler.scheduler_stack import Router, stack
from tests.fakes.worker.fake_worker import undisturbed


async def test_session_of_a_router_that_does_not_read_is_ended() -> None:
    async with stack(session_queue=8, max_model_len=256, seqs=32, num_pages=4000) as s:
        call = s.stub.Session()
        await call.write(scheduler_pb2.SessionRequest(hello=scheduler_pb2.SessionHello(protocol_version=1)))
        message = scheduler_pb2.SessionRequest()
        for handle in range(32):
            submit = message.submit.add(handle=handle)
            submit.sequence.CopyFrom(sequence_to_pb(a_sequence(4, 240)))
        await call.write(message)
        # Refusals fill the queue as well as steps do: the transport's own window is what has to fill first.
        flood = scheduler_pb2.SessionRequest()
        for handle in range(100, 5100):
            flood.submit.add(handle=handle)
        await call.write(flood)
        await s.until(lambda: s.core.idle)
        with pytest.raises(grpc.RpcError) as ended:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert from_rpc_error(ended.value).code == "SESSION_TOO_SLOW"
        await s.until_quiet()


async def test_slow_router_does_not_slow_other_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {"bytes": 0, "frames": 0}

    def watch(name: str) -> None:
        add: Callable[..., bool] = getattr(Session, name)

        def watched(self: Session, *what: object) -> bool:
            taken = add(self, *what)
            most["bytes"] = max(most["bytes"], self._bytes)
            most["frames"] = max(most["frames"], len(self._waiting))
            return taken

        monkeypatch.setattr(Session, name, watched)

    watch("_put")
    watch("_join_last_message")
    async with stack(session_queue_bytes=1 << 16, max_model_len=256, seqs=8, num_pages=4000) as s:
        s.worker.step_s = 0.005
        reader = Router(s)
        await reader.open()
        await reader.submit({handle: a_sequence(4 + handle, 240) for handle in range(4)})
        slow = s.stub.Session()
        await slow.write(scheduler_pb2.SessionRequest(hello=scheduler_pb2.SessionHello(protocol_version=1)))
        message = scheduler_pb2.SessionRequest()
        for handle in range(4):
            message.submit.add(handle=handle).sequence.CopyFrom(sequence_to_pb(a_sequence(4, 240)))
        await slow.write(message)
        await s.until(lambda: s.core.load().running == 8)
        flood = scheduler_pb2.SessionRequest()
        for handle in range(100, 1100):
            flood.submit.add(handle=handle)
        async with asyncio.timeout(60):
            while len(s.engine._sinks) == 2:
                await slow.write(flood)
                await asyncio.sleep(0)
        assert s.core.load().running == 4, "its requests are aborted, the other's run"
        ended = time.monotonic()
        await reader.done(*range(4))
        assert time.monotonic() - ended < 60 and reader.silence_s < 20.0
        for handle in range(4):
            assert reader.tokens[handle] == undisturbed(a_sequence(4 + handle, 240))[0]
        assert 0 < most["bytes"] <= 1 << 16 and most["frames"] <= 4096
        with pytest.raises(grpc.RpcError) as told:
            while await slow.read() is not grpc.aio.EOF:
                pass
        assert from_rpc_error(told.value).code == "SESSION_TOO_SLOW"
        await s.until_quiet()


async def test_slow_router_gets_joined_steps() -> None:
    """By the router's own channel: what it has not taken waits at the scheduler after 16 KiB, not in a window that
    grows."""
    async with stack(max_model_len=1024, seqs=64, num_pages=4000) as s:
        s.worker.step_s = 0.001
        client = SchedulerClient(s.address, RouterConfig())
        call = client.stub.Session()
        await call.write(scheduler_pb2.SessionRequest(hello=scheduler_pb2.SessionHello(protocol_version=1)))
        message = scheduler_pb2.SessionRequest()
        for handle in range(64):
            message.submit.add(handle=handle).sequence.CopyFrom(sequence_to_pb(a_sequence(4 + handle, 900)))
        await call.write(message)
        await s.until(lambda: s.core.idle and s.core.load().waiting == 0 and s.core.stats.steps > 0)
        tokens: dict[int, list[int]] = {handle: [] for handle in range(64)}
        messages, ended = 0, 0
        async with asyncio.timeout(60):
            while ended < 64:
                told = await call.read()
                messages, ended, at = messages + bool(told.handle), ended + len(told.finished), 0
                columns = (i32(column, "column").tolist() for column in (told.handle, told.count))
                token = i32(told.token, "token").tolist()
                for handle, count in zip(*columns, strict=True):
                    tokens[handle] += token[at : at + count]
                    at += count
        assert all(tokens[handle] == undisturbed(a_sequence(4 + handle, 900))[0] for handle in range(64))
        assert messages < 60, "of 900 steps: 22, and 252 with a window as gRPC has it"
        call.cancel()
        await client.close()
        await s.until_quiet()

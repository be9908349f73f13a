"""Queues are bounded: a router that does not read loses its session, and nobody else notices."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from quire.v1 import scheduler_pb2
from quire_common.errors import from_rpc_error
from quire_common.sequence import sequence_to_pb
from quire_scheduler.session import Session
from tests.fakes.fake_worker import undisturbed
from tests.fakes.scheduler_rig import a_sequence
from tests.fakes.scheduler_stack import Router, stack


async def test_a_router_that_does_not_read_is_ended() -> None:
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


async def test_the_others_go_on_at_full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {"bytes": 0, "frames": 0}
    put = Session._put

    def watched(self: Session, message: scheduler_pb2.SessionResponse) -> bool:
        taken = put(self, message)
        most["bytes"] = max(most["bytes"], self._bytes)
        most["frames"] = max(most["frames"], len(self._waiting))
        return taken

    monkeypatch.setattr(Session, "_put", watched)
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

"""A peer that reads slowly or not at all harms no other, and has bounded buffers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from quire.v1 import inference_pb2 as ib
from quire.v1 import inference_pb2_grpc
from tests.fakes.router.router_faults import WAIT_S, joined, nothing_left, until
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

TOKENS = 30_000
# uvicorn's mark for its own buffer, and one frame: after that a stream waits.
MOST_BUFFERED = 64 * 1024 + 16 * 1024


def eager() -> FakeScheduler:
    return FakeScheduler(step_s=0, tokens_per_step=10, max_model_len=1_000_000)


class DeafClient:
    """Sends a request over a socket with a small window, and reads only when told to."""

    def __init__(self, rig: RouterRig) -> None:
        self._rig = rig
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.setblocking(False)

    async def ask(self, **fields: Any) -> None:
        host, port = self._rig.router.http.address.split(":")
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.socket, (host, int(port)))
        body = json.dumps({"prompt": "abcde", "max_tokens": TOKENS, **fields}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(self.socket, head.encode() + body)

    async def read_all(self) -> bytes:
        received = b""
        async with asyncio.timeout(WAIT_S):
            while b"[DONE]" not in received:
                piece = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 20)
                assert piece, "the stream broke"
                received += piece
        return received


@pytest.fixture
def deaf_sockets() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


@contextlib.asynccontextmanager
async def narrow(rig: RouterRig) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    """A client whose calls take 64 KiB unread, whatever its connection could carry."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with grpc.aio.insecure_channel(rig.grpc_address, options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def buffered(rig: RouterRig) -> int:
    """Bytes in the HTTP server's own write buffers."""
    connections = rig.router.http.connections
    return sum(protocol.transport.get_write_buffer_size() for protocol in connections)


async def test_non_reading_http_client_has_a_bounded_buffer_and_loses_nothing(
    deaf_sockets: list[socket.socket],
) -> None:
    scheduler = eager()
    async with router_rig([scheduler], served_model_name=("m" * 400,)) as rig:
        deaf = DeafClient(rig)
        deaf_sockets.append(deaf.socket)
        await deaf.ask(stream=True)
        most = 0
        await until(lambda: len(scheduler.submits) == 1)
        async with asyncio.timeout(WAIT_S):
            while scheduler.running:  # the engine goes on to the end
                most = max(most, buffered(rig))
                await asyncio.sleep(0.001)
        assert 0 < buffered(rig) <= max(most, buffered(rig)) <= MOST_BUFFERED
        other = await rig.http.post("/v1/completions", json={"prompt": "xy", "max_tokens": 4})
        assert other.json()["choices"][0]["text"] == "xyxy"
        assert rig.router.admission.inside == 1
        received = await deaf.read_all()
        chunks = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
        assert joined(chunks) == "abcde" * (TOKENS // 5)
        assert len(chunks) < TOKENS // 20  # what it did not take was joined
        await until(lambda: nothing_left(rig) and rig.router.admission.inside == 0)


async def test_non_reading_http_client_is_dropped_after_client_stall_s(deaf_sockets: list[socket.socket]) -> None:
    async with router_rig([eager()], served_model_name=("m" * 400,), client_stall_s=1.0) as rig:
        rig.scheduler.step_s = 0.01
        deaf = DeafClient(rig)
        deaf_sockets.append(deaf.socket)
        await deaf.ask(stream=True, max_tokens=900_000)
        await until(lambda: rig.router.admission.inside == 1)
        await until(lambda: rig.router.admission.inside == 0 and nothing_left(rig))
        assert rig.scheduler.aborts


async def test_non_reading_grpc_call_buffers_one_message_and_loses_nothing() -> None:
    async with router_rig([eager()]) as rig, narrow(rig) as stub:
        request = ib.GenerateRequest(text="abcde", max_tokens=TOKENS, request_id="r" * 100)
        call = stub.Generate(request)
        await until(lambda: bool(rig.scheduler.submits) and not rig.scheduler.running)
        taken = [answer async for answer in stub.Generate(ib.GenerateRequest(text="xy", max_tokens=4))]
        assert "".join(answer.text for answer in taken) == "xyxy"  # on the same connection
        assert rig.router.admission.inside == 1
        answers = [answer async for answer in call]
        assert "".join(answer.text for answer in answers) == "abcde" * (TOKENS // 5)
        assert len(answers) < TOKENS // 15
        assert answers[-1].usage.completion_tokens == TOKENS


async def test_non_reading_grpc_call_is_dropped_and_its_connection_stays_open() -> None:
    async with router_rig([eager()], client_stall_s=0.5) as rig, narrow(rig) as stub:
        rig.scheduler.step_s = 0.005
        request = ib.GenerateRequest(text="abcde", max_tokens=900_000, request_id="r" * 100)
        call = stub.Generate(request)
        await until(lambda: rig.router.admission.inside == 1)
        await until(lambda: rig.router.admission.inside == 0 and nothing_left(rig))
        assert rig.scheduler.aborts
        taken = [answer async for answer in stub.Generate(ib.GenerateRequest(text="xy", max_tokens=4))]
        assert "".join(answer.text for answer in taken) == "xyxy"
        answers = [answer async for answer in call]
        assert answers[-1].error.code == "CLIENT_STALLED"


@pytest.mark.deep
async def test_slowly_reading_grpc_call_is_not_dropped() -> None:
    async with router_rig([eager()], client_stall_s=4.0) as rig, narrow(rig) as stub:
        call = stub.Generate(ib.GenerateRequest(text="abcde", max_tokens=TOKENS, request_id="r" * 100))
        told, began = "", time.monotonic()
        while answer := await call.read():
            told += answer.text
            if time.monotonic() - began < 5:  # in all it takes longer than who reads nothing may
                await asyncio.sleep(0.004)
        assert told == "abcde" * (TOKENS // 5)


@pytest.mark.deep
async def test_non_reading_scheduler_later_gets_only_requests_still_wanted() -> None:
    """What is given up meanwhile harms nobody, whether gRPC had taken it or not."""
    async with router_rig([FakeScheduler(max_model_len=1_000_000)], max_concurrent_requests=64) as rig:
        rig.scheduler.reading.clear()
        ids = list(b"abc") * 50_000
        waiting = [asyncio.ensure_future(rig.complete(ids, max_tokens=3)) for _ in range(24)]
        (replica,) = rig.router.fleet.replicas.values()
        await until(lambda: len(replica.session.sequences) == 24)
        for request in waiting[12:]:
            request.cancel()
        await until(lambda: len(replica.session.sequences) == 12)
        rig.scheduler.reading.set()
        assert [r.json()["choices"][0]["text"] for r in await asyncio.gather(*waiting[:12])] == ["abc"] * 12
        await until(lambda: nothing_left(rig))

"""The public gRPC port reads no messages of callers without a key, and bounds what a client may send."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from quire.v1 import inference_pb2 as ib
from quire_common.telemetry.metrics import registry
from quire_router.front.grpc import grpc_limits
from quire_router.front.http import admin
from tests.fakes.router.router_faults import until
from tests.fakes.router.router_rig import RouterRig, router_rig

GENERATE = "/quire.v1.Inference/Generate"
LIST = "/quire.v1.Inference/ListModels"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
KEY = (("authorization", "Bearer k"),)
MIB = 1 << 20


def a_request(text: str = "ab") -> bytes:
    return ib.GenerateRequest(text=text, max_tokens=2).SerializeToString()


def counted(method: str, cause: str) -> float:
    labels = {"service": "quire.v1.Inference", "method": method, "cause": cause}
    return registry.get_sample_value("quire_grpc_server_refused_total", labels) or 0.0


def raw_channel(address: str, *args: Any, **options: Any) -> Any:
    """A channel whose calls take and give bytes, which the type stubs do not know."""
    return grpc.aio.insecure_channel(address, *args, **options)


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in call:
            pass
    return error.value


@pytest.fixture
async def rig() -> AsyncIterator[RouterRig]:
    async with router_rig(api_key=("k",)) as rig:
        yield rig


async def test_call_without_a_key_is_refused_before_its_message_is_read(rig: RouterRig) -> None:
    """A client that never sends its message has its answer all the same."""
    before = counted("Generate", "MISSING_API_KEY")
    async with raw_channel(rig.grpc_address) as channel:
        never = asyncio.Event()

        async def silent() -> AsyncIterator[bytes]:
            await never.wait()
            yield b""

        for path in (GENERATE, REFLECT):
            call = channel.stream_stream(path)(silent())
            error = await asyncio.wait_for(refused(call), 5)
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED, path
            assert "MISSING_API_KEY" in str(error.trailing_metadata()), path
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await asyncio.wait_for(channel.stream_unary(LIST)(silent()), 5)
        assert unary.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert counted("Generate", "MISSING_API_KEY") == before + 1


async def test_messages_without_a_key_are_not_decompressed(rig: RouterRig) -> None:
    """Eight at once of 60 KB each, which are 60 MB when they are unpacked."""
    bomb = a_request("a" * (60 * MIB))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with raw_channel(rig.grpc_address, compression=grpc.Compression.Gzip) as channel:
        calls = [channel.unary_stream(GENERATE)(bomb) for _ in range(8)]
        codes = {(await refused(call)).code() for call in calls}
    assert codes <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
    # The client of this test is in the same process: it holds the message once for each call.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


async def test_messages_without_a_key_are_not_read_from_the_network(rig: RouterRig) -> None:
    """gRPC takes what its window allows before anybody reads, and by default lets the window grow with the traffic."""
    message, passed = a_request("a" * 3 * MIB), 0
    host, port = rig.grpc_address.split(":")

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, counts: bool) -> None:
            nonlocal passed
            while data := await source.read(64 * 1024):
                passed += len(data) * counts
                sink.write(data)
                await sink.drain()
            sink.close()

        await asyncio.gather(copy(reader, far_writer, True), copy(far_reader, writer, False), return_exceptions=True)

    proxy = await asyncio.start_server(between, "127.0.0.1", 0)
    try:
        address = "{}:{}".format(*proxy.sockets[0].getsockname())
        async with raw_channel(address) as channel:
            for _ in range(8):
                await asyncio.gather(*(refused(channel.unary_stream(GENERATE)(message)) for _ in range(4)))
            stranger = passed
            answers = [answer async for answer in channel.unary_stream(GENERATE)(a_request(), metadata=KEY)]
    finally:
        proxy.close()  # not waited for: from Python 3.12 on, that is until the last connection has ended
    assert answers
    assert stranger < 32 * 0.5 * MIB


async def test_compressed_and_long_messages_get_named_errors(rig: RouterRig) -> None:
    async with raw_channel(rig.grpc_address, compression=grpc.Compression.Gzip) as channel:
        packed = await refused(channel.unary_stream(GENERATE)(a_request("a" * MIB), metadata=KEY))
    async with raw_channel(rig.grpc_address) as channel:
        long = await refused(channel.unary_stream(GENERATE)(a_request("a" * 5 * MIB), metadata=KEY))
        answers = [answer async for answer in channel.unary_stream(GENERATE)(a_request(), metadata=KEY)]
    assert (packed.code(), long.code()) == (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "larger than max" in str(long.details())
    assert answers


async def test_call_without_a_message_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_limits, "RECEIVE_TIMEOUT_S", 0.3)
    never = asyncio.Event()

    async def silent() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    async with router_rig(api_key=("k",)) as rig, raw_channel(rig.grpc_address) as channel:
        slow = await asyncio.wait_for(refused(channel.stream_stream(GENERATE)(silent(), metadata=KEY)), 5)
        empty = await asyncio.wait_for(refused(channel.stream_stream(GENERATE)(nothing(), metadata=KEY)), 5)
    assert slow.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "MESSAGE_TIMEOUT" in str(slow.trailing_metadata())
    assert empty.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_grpc_connections_are_bounded() -> None:
    async with router_rig(max_connections=4) as rig:
        alone = (("grpc.use_local_subchannel_pool", 1),)
        channels = [raw_channel(rig.grpc_address, alone) for _ in range(9)]
        answered = 0
        for channel in channels:
            try:
                await channel.unary_unary(LIST)(b"", timeout=2)
                answered += 1
            except grpc.aio.AioRpcError as error:
                assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert answered <= 4
        assert answered >= 3, "the rig has one of its own"
        for channel in channels:
            await channel.close()


async def test_concurrent_grpc_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused calls have their answer at once, though other calls wait for their messages."""
    monkeypatch.setattr(grpc_limits, "_MORE_CALLS", 2)
    never = asyncio.Event()

    async def silent() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    async with router_rig(max_concurrent_requests=2) as rig:
        alone = (("grpc.use_local_subchannel_pool", 1),)
        channels = [raw_channel(rig.grpc_address, alone) for _ in range(8)]
        calls = [channel.stream_stream(GENERATE)(silent()) for channel in channels]
        ends = [asyncio.ensure_future(call.code()) for call in calls]
        await until(lambda: sum(end.done() for end in ends) == 4)
        assert {end.result() for end in ends if end.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in calls:
            call.cancel()
        await asyncio.gather(*ends)
        for channel in channels:
            await channel.close()


async def closed_of(address: str, count: int) -> int:
    """How many of so many connections the router closes at once."""
    host, port = address.rsplit(":", 1)
    pairs = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    closed = 0
    for reader, _ in pairs:
        try:
            closed += await asyncio.wait_for(reader.read(1), 0.5) == b""
        except ConnectionResetError:
            closed += 1
        except TimeoutError:
            continue
    for _, writer in pairs:
        writer.close()
    return closed


async def test_http_connections_are_bounded() -> None:
    async with router_rig(max_connections=3) as rig:
        assert await closed_of(rig.router.http.address, 6) == 3
        assert registry.get_sample_value("quire_router_http_refused_total", {"cause": "TOO_MANY_CONNECTIONS"})


async def test_connections_to_the_port_for_metrics_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_CONNECTIONS", 3)
    async with router_rig(metrics_listen="127.0.0.1:0", max_connections=5) as rig:
        assert rig.router.admin.http is not None
        assert await closed_of(rig.router.admin.http.address, 6) == 3


async def test_refusals_are_counted_by_cause(rig: RouterRig) -> None:
    def http(cause: str) -> float:
        return registry.get_sample_value("quire_router_http_refused_total", {"cause": cause}) or 0.0

    before = http("MISSING_API_KEY"), http("NO_SUCH_PATH"), counted("Generate", "OUT_OF_RANGE")
    assert (await rig.http.post("/v1/completions", json={})).status_code == 401
    assert (await rig.http.get("/none", headers={"Authorization": "Bearer k"})).status_code == 404
    async with raw_channel(rig.grpc_address) as channel:
        wrong = ib.GenerateRequest(text="a", n=10_000).SerializeToString()
        error = await refused(channel.unary_stream(GENERATE)(wrong, metadata=KEY))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    after = http("MISSING_API_KEY"), http("NO_SUCH_PATH"), counted("Generate", "OUT_OF_RANGE")
    assert [now - then for now, then in zip(after, before, strict=True)] == [1.0, 1.0, 1.0], after

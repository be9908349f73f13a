"""Interceptors over real servers: errors, request ids, metrics, cancellation; all call kinds, aio and threads."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from quire_common.errors import Internal, Overloaded, QuireError, from_rpc_error
from quire_common.telemetry.logs import request_id
from quire_common.telemetry.metrics import registry
from tests.fakes.echo import KINDS, SERVICE, aio_call, aio_echo, aio_finish, aio_start, sync_call, sync_echo

if TYPE_CHECKING:
    from collections.abc import Iterator

AIO_KINDS = (*KINDS, "Writes")


@pytest.fixture(autouse=True)
def no_request_id() -> Iterator[None]:
    token = request_id.set("")
    yield
    request_id.reset(token)


def handled(kind: str, code: str) -> float:
    labels = {"service": SERVICE, "method": kind, "code": code}
    return registry.get_sample_value("quire_grpc_server_handled_total", labels) or 0.0


def observed(kind: str) -> float:
    labels = {"service": SERVICE, "method": kind}
    return registry.get_sample_value("quire_grpc_server_latency_seconds_count", labels) or 0.0


def check_typed(error: QuireError) -> None:
    assert isinstance(error, Overloaded)
    assert (error.code, error.message, error.fix) == ("QUEUE_FULL", "The queue is full.", "Come back later.")
    assert (error.param, error.retry_after_s) == ("n", 1.5)


def check_bug(error: QuireError, details: str | None, log_text: str) -> None:
    assert isinstance(error, Internal) and error.code == "INTERNAL"
    assert "secret" not in f"{error.message} {error.fix} {details}"
    assert "secret text of a bug" in log_text and "ZeroDivisionError" in log_text


@pytest.mark.parametrize("kind", AIO_KINDS)
async def test_aio_answers_and_counts(kind: str) -> None:
    before = handled(kind, "OK"), observed(kind)
    async with aio_echo() as (_, channel):
        assert await aio_call(channel, kind, b"hello") == b"HELLO"
    assert (handled(kind, "OK"), observed(kind)) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_sync_answers_and_counts(kind: str) -> None:
    before = handled(kind, "OK"), observed(kind)
    with sync_echo() as (_, channel):
        assert sync_call(channel, kind, b"hello") == b"HELLO"
    assert (handled(kind, "OK"), observed(kind)) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("kind", AIO_KINDS)
async def test_aio_typed_error_arrives_whole(kind: str) -> None:
    before = handled(kind, "RESOURCE_EXHAUSTED")
    async with aio_echo() as (_, channel):
        with pytest.raises(grpc.RpcError) as caught:
            await aio_call(channel, kind, b"typed")
    check_typed(from_rpc_error(caught.value))
    assert handled(kind, "RESOURCE_EXHAUSTED") == before + 1


@pytest.mark.parametrize("kind", KINDS)
def test_sync_typed_error_arrives_whole(kind: str) -> None:
    before = handled(kind, "RESOURCE_EXHAUSTED")
    with sync_echo() as (_, channel), pytest.raises(grpc.RpcError) as caught:
        sync_call(channel, kind, b"typed")
    check_typed(from_rpc_error(caught.value))
    assert handled(kind, "RESOURCE_EXHAUSTED") == before + 1


@pytest.mark.parametrize("kind", AIO_KINDS)
async def test_aio_bug_is_internal_and_its_text_stays_here(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    before = handled(kind, "INTERNAL")
    with caplog.at_level(logging.INFO):
        async with aio_echo() as (_, channel):
            with pytest.raises(grpc.RpcError) as caught:
                await aio_call(channel, kind, b"bug")
    assert isinstance(caught.value, grpc.aio.AioRpcError)
    check_bug(from_rpc_error(caught.value), caught.value.details(), caplog.text)
    assert handled(kind, "INTERNAL") == before + 1


@pytest.mark.parametrize("kind", KINDS)
def test_sync_bug_is_internal_and_its_text_stays_here(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    before = handled(kind, "INTERNAL")
    with caplog.at_level(logging.INFO), sync_echo() as (_, channel), pytest.raises(grpc.RpcError) as caught:
        sync_call(channel, kind, b"bug")
    check_bug(from_rpc_error(caught.value), str(caught.value), caplog.text)
    assert handled(kind, "INTERNAL") == before + 1


@pytest.mark.parametrize(("request_", "code"), [(b"abort", "DATA_LOSS"), (b"code", "OUT_OF_RANGE")])
@pytest.mark.parametrize("kind", AIO_KINDS)
async def test_aio_handlers_may_use_grpc_codes(kind: str, request_: bytes, code: str) -> None:
    before = handled(kind, code)
    async with aio_echo() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await aio_call(channel, kind, request_)
    assert caught.value.code().name == code
    assert handled(kind, code) == before + 1


@pytest.mark.parametrize(("request_", "code"), [(b"abort", "DATA_LOSS"), (b"code", "OUT_OF_RANGE")])
@pytest.mark.parametrize("kind", KINDS)
def test_sync_handlers_may_use_grpc_codes(kind: str, request_: bytes, code: str) -> None:
    before = handled(kind, code)
    with sync_echo() as (_, channel), pytest.raises(grpc.RpcError) as caught:
        sync_call(channel, kind, request_)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code().name == code
    assert handled(kind, code) == before + 1


@pytest.mark.parametrize("kind", AIO_KINDS)
async def test_aio_request_id_travels_but_with_a_stream_of_many_requests(kind: str) -> None:
    request_id.set("req-42")
    async with aio_echo() as (_, channel):
        assert await aio_call(channel, kind, b"id") == (b"" if kind == "Bidi" else b"req-42")


@pytest.mark.parametrize("kind", KINDS)
def test_sync_request_id_travels_and_does_not_stay(kind: str) -> None:
    with sync_echo(workers=1) as (_, channel):
        request_id.set("req-42")
        assert sync_call(channel, kind, b"id") == b"req-42"
        request_id.set("")
        assert sync_call(channel, kind, b"id") == b""


@pytest.mark.parametrize("kind", ["Unary", "ClientStream", "Writes", "ServerStream", "Bidi"])
async def test_aio_cancellation_reaches_the_handler(kind: str) -> None:
    before = handled(kind, "CANCELLED")
    async with aio_echo() as (echo, channel):
        call = aio_start(channel, kind, b"wait")
        task = asyncio.ensure_future(aio_finish(call, kind))
        await asyncio.wait_for(echo.started.wait(), 30)
        call.cancel()  # cancelling the task alone can miss: grpc.aio forgets the call while it is being prepared
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.wait_for(echo.finished.get(), 30) == "cancelled"
    assert handled(kind, "CANCELLED") == before + 1


async def test_aio_generator_closes_when_the_client_leaves_between_messages() -> None:
    async with aio_echo() as (echo, channel):
        call = channel.unary_stream(f"/{SERVICE}/ServerStream")(b"wait")
        async for _ in call:
            break
        call.cancel()
        assert await asyncio.wait_for(echo.finished.get(), 30) in ("closed", "cancelled")


async def test_aio_stray_cancelled_error_of_a_handler_is_internal_not_silence() -> None:
    async with aio_echo() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(aio_call(channel, "Unary", b"lost"), 30)
    assert caught.value.code() is grpc.StatusCode.INTERNAL


def test_sync_generator_closes_when_the_client_leaves() -> None:
    before = handled("ServerStream", "CANCELLED")
    with sync_echo() as (echo, channel):
        call = channel.unary_stream(f"/{SERVICE}/ServerStream")(b"forever")
        assert echo.started.wait(30)
        call.cancel()
        assert echo.closed.wait(30)
    assert handled("ServerStream", "CANCELLED") == before + 1


async def test_aio_concurrent_calls_keep_their_own_request_ids() -> None:
    async def one(channel: Any, name: str) -> bytes:
        request_id.set(name)
        return await aio_call(channel, "Writes", b"id")

    async with aio_echo() as (_, channel):
        names = [f"r{i}" for i in range(50)]
        assert await asyncio.gather(*(one(channel, name) for name in names)) == [name.encode() for name in names]


async def test_an_unknown_method_stays_unimplemented_and_unlabelled() -> None:
    async with aio_echo() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert handled("Nothing", "UNIMPLEMENTED") == 0


async def test_a_hostile_request_id_is_cut_and_cleaned() -> None:
    async with aio_echo() as (_, channel):
        call = channel.unary_unary(f"/{SERVICE}/Unary")(b"id", metadata=grpc.aio.Metadata(("x-request-id", "x" * 5000)))
        assert await call == b"x" * 128

"""Channels and the time it takes to connect: slow ways are waited for, and who refuses is soon tried again."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import grpc
import pytest

from quire_common.channel import aio_channel, sync_channel
from quire_common.config import ServiceConfig
from tests.fakes.echo import aio_call, sync_call, sync_echo_port
from tests.tcp_relay import TcpRelay

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def slow_address() -> Iterator[str]:
    """Of a server each of whose answers, the first frame of a connection among them, takes most of a second."""
    with sync_echo_port() as port, TcpRelay(("127.0.0.1", port), "slow") as relay:
        relay.delay_s = 0.8
        yield f"127.0.0.1:{relay.port}"


def test_a_slow_way_is_no_refusal_in_threads(slow_address: str) -> None:
    with contextlib.closing(sync_channel(slow_address, ServiceConfig(), "worker")) as channel:
        assert sync_call(channel, "Unary", b"far") == b"FAR"


async def test_a_slow_way_is_no_refusal_in_asyncio(slow_address: str) -> None:
    async with aio_channel(slow_address, ServiceConfig(), "worker") as channel:
        assert await aio_call(channel, "Unary", b"far") == b"FAR"


def test_who_refuses_is_soon_tried_again() -> None:
    attempts: list[float] = []
    enough = threading.Event()

    def refuse() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()
                attempts.append(time.monotonic())
                if len(attempts) == 4:
                    enough.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        refusing = threading.Thread(target=refuse)
        refusing.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.closing(sync_channel(address, ServiceConfig(), "worker")) as channel:
            while not enough.wait(0.05):
                with pytest.raises(grpc.RpcError):
                    sync_call(channel, "Unary", b"")
        listener.shutdown(socket.SHUT_RDWR)
        refusing.join()
    assert attempts[3] - attempts[0] < 4.0, "a tenth of a second, growing by half; gRPC would wait for 4.1 s at least"

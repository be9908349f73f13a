"""Certificates, keys and authorities change under load, and old ones expire: no call fails, and no restart is needed.

Servers close each connection after a moment, so that calls meet handshakes all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire_common.channel import aio_channel, sync_channel
from quire_common.config import ServiceConfig
from quire_common.identity.watched_channel import WatchedAioChannel
from quire_common.identity.watched_context import WatchedContext
from quire_common.transport import SERVER_OPTIONS, server_credentials, tls_files
from quire_router.front.http.server import HttpServer
from tests.certificates import HOST, Authority, TlsFiles, replace

# A process shows a certificate up to two seconds after it was written (two looks at the files, where the first one
# comes between key and certificate). X.509 counts whole seconds, so a certificate may live a second less. What is left
# is for a busy machine: 8 - 1 - 2 - 2 = 3 s.
LIFE_S = 8.0
RENEWED_EVERY_S = 2.0
LOAD_S = 14.0
CONNECTION_MS = 300
LIMIT_S = 30.0


def config_of(files: TlsFiles) -> ServiceConfig:
    return ServiceConfig(tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)


class Pairs:
    """The certificates of a worker and of a kvstore, which live for seconds and are renewed while `renewing`, at each
    step. Halfway, the authority is replaced as well: at first services trust both, then certificates are the new one's,
    then the old one is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authorities = [Authority(folder, "old"), Authority(folder, "new")]
        self._ca = folder / "ca.pem"
        self._issue(0, trusted=(0,))
        self.server, self.client = (
            config_of(TlsFiles(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(self._ca)))
            for name in ("kvstore", "worker")
        )

    @contextlib.contextmanager
    def renewing(self) -> Iterator[None]:
        done = threading.Event()
        thread = threading.Thread(target=self._renew, args=(done,))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _renew(self, done: threading.Event) -> None:
        steps: list[Callable[[], None]] = [
            lambda: self._issue(0),
            lambda: self._issue(0),
            lambda: self._issue(0, trusted=(0, 1)),
            lambda: self._issue(1),
            lambda: self._issue(1),
            lambda: self._issue(1, trusted=(1,)),
        ]
        while not done.wait(RENEWED_EVERY_S):
            (steps.pop(0) if steps else lambda: self._issue(1))()

    def _issue(self, number: int, trusted: tuple[int, ...] = ()) -> None:
        """Renew the certificates, by this authority; the services are to trust the authorities `trusted` from now
        on."""
        if trusted:
            replace(self._ca, b"".join(Path(self._authorities[trust].ca).read_bytes() for trust in trusted))
        for name in ("kvstore", "worker"):
            self._authorities[number].files(name, name, life_s=LIFE_S)


class Echo(grpc.GenericRpcHandler):
    def __init__(self, *, aio: bool) -> None:
        async def late(message: bytes, _: Any) -> bytes:
            return message

        self._handler: Any = grpc.unary_unary_rpc_method_handler(late if aio else lambda message, _: message)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handler


OPTIONS = [*SERVER_OPTIONS, ("grpc.max_connection_age_ms", CONNECTION_MS), ("grpc.max_connection_age_grace_ms", 10_000)]


@contextlib.asynccontextmanager
async def serving(config: ServiceConfig, *, aio: bool) -> AsyncIterator[str]:
    credentials = server_credentials(tls_files(config))
    assert credentials is not None
    server: Any = (
        grpc.aio.server(options=OPTIONS) if aio else grpc.server(futures.ThreadPoolExecutor(8), options=OPTIONS)
    )
    server.add_generic_rpc_handlers((Echo(aio=aio),))
    port = server.add_secure_port(f"{HOST}:0", credentials)
    if aio:
        await server.start()
    else:
        server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        stopped = server.stop(0)
        if aio:
            await stopped
        else:
            stopped.wait()


async def calls_until(deadline: float, channel: grpc.aio.Channel) -> int:
    call: Any = channel.unary_unary("/quire.v1.KvStore/Check")
    count = 0
    while time.monotonic() < deadline:
        assert await call(b"message", timeout=LIMIT_S) == b"message"
        count += 1
        await asyncio.sleep(0.01)
    return count


def blocking_calls_until(deadline: float, channel: grpc.Channel) -> int:
    call: Any = channel.unary_unary("/quire.v1.KvStore/Check")
    count = 0
    while time.monotonic() < deadline:
        assert call(b"message", timeout=LIMIT_S) == b"message"
        count += 1
        time.sleep(0.01)
    return count


@pytest.mark.deep
@pytest.mark.parametrize("aio", [True, False], ids=["asyncio server", "threaded server"])
async def test_no_call_fails_while_certificates_and_authorities_change_and_expire(tmp_path: Path, aio: bool) -> None:
    pairs = Pairs(tmp_path)
    async with serving(pairs.server, aio=aio) as address:
        deadline = time.monotonic() + LOAD_S
        with pairs.renewing(), contextlib.closing(sync_channel(address, pairs.client, "kvstore")) as blocking:
            async with aio_channel(address, pairs.client, "kvstore") as channel:
                counts = await asyncio.gather(
                    *(calls_until(deadline, channel) for _ in range(3)),
                    asyncio.to_thread(blocking_calls_until, deadline, blocking),
                )
    assert min(counts) > 10


async def test_a_stream_outlives_the_certificates_that_it_began_with(tmp_path: Path) -> None:
    """The channel of before stays open until its last call has ended, and closes then."""
    authority = Authority(tmp_path)
    server, client = (config_of(authority.files(name, name)) for name in ("kvstore", "worker"))

    async def count(request: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for message in request:
            yield message

    class Streams(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            return grpc.stream_stream_rpc_method_handler(count)

    credentials = server_credentials(tls_files(server))
    assert credentials is not None
    running = grpc.aio.server(options=SERVER_OPTIONS)
    running.add_generic_rpc_handlers((Streams(),))
    address = f"{HOST}:{running.add_secure_port(f'{HOST}:0', credentials)}"
    await running.start()
    channel = aio_channel(address, client, "kvstore")
    assert isinstance(channel, WatchedAioChannel)
    method: Any = channel.stream_stream("/quire.v1.KvStore/Put")
    first = method()
    await first.write(b"one")
    assert await first.read() == b"one"
    before = channel.current()
    authority.files("worker", "worker")
    deadline = time.monotonic() + LIMIT_S
    while channel.current() is before:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    second = method()
    await second.write(b"two")
    assert await second.read() == b"two"
    await first.write(b"three")
    assert await first.read() == b"three"
    await first.done_writing()
    assert await first.read() is grpc.aio.EOF
    while before.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    second.cancel()
    await channel.close()
    await running.stop(0)


def serial_at(address: str, ca: str) -> str:
    """The number of the certificate that a server shows to a new client."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=ca)
    with (
        socket.create_connection((host, int(port)), LIMIT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        return str((secured.getpeercert() or {})["serialNumber"])


async def test_the_http_port_shows_a_new_certificate_without_a_restart(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.files("public")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """The test sends no request to it."""

    server = HttpServer(app, HOST, 0, files.cert, files.key)
    await server.start()
    try:
        before = await asyncio.to_thread(serial_at, server.address, files.ca)
        assert await asyncio.to_thread(serial_at, server.address, files.ca) == before
        authority.files("public")
        deadline = time.monotonic() + LIMIT_S
        while (after := await asyncio.to_thread(serial_at, server.address, files.ca)) == before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        replace(Path(files.cert), b"no certificate")
        await asyncio.sleep(2.5)
        assert await asyncio.to_thread(serial_at, server.address, files.ca) == after, "a bad file changes nothing"
    finally:
        await server.close()


def test_a_context_that_follows_files_is_made_of_good_ones(tmp_path: Path) -> None:
    files = Authority(tmp_path).files("server")
    Path(files.key).write_text("no key")
    with pytest.raises(Exception, match="are not a certificate and its key"):
        WatchedContext("test", tls_files(config_of(files)))

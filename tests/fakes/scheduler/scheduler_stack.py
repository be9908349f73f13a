"""A scheduler service with a fake worker behind it, over real gRPC in one loop; with a router and a kvstore."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
import pytest

from quire.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from quire_common.columns import i32, pack_i32
from quire_common.errors import from_message, from_rpc_error
from quire_common.sequence import RequestContext, Sequence, context_to_pb, sequence_to_pb
from quire_common.serving.server import BoundServer
from quire_common.telemetry.interceptors import aio_server_interceptors
from quire_common.transport import SERVER_OPTIONS
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.server import SchedulerService
from tests.fakes.router.fake_pages import FakePages
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.worker.fake_worker import make_hello, undisturbed, with_address
from tests.fakes.worker.fake_worker_service import FakeWorkerService

LIMIT_S = 60.0


class Stack:
    """A scheduler service in this loop, and a channel to it."""

    def __init__(self, worker: FakeWorkerService, service: SchedulerService, address: str) -> None:
        self.worker = worker
        self.service = service
        self.address = address
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = scheduler_pb2_grpc.SchedulerStub(self.channel)

    @property
    def engine(self) -> Any:
        return self.service._engine

    @property
    def core(self) -> Any:
        return self.engine.core

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                await asyncio.sleep(0.01)

    async def share(self, pages: dict[bytes, list[int]]) -> None:
        """The worker moves its pages to and from these."""
        assert self.worker.worker is not None
        self.worker.store = self.worker.worker.store = pages

    async def until_quiet(self) -> None:
        await self.until(lambda: self.core is not None and self.core.quiet)
        self.core.check_integrity()
        assert self.core.load().referenced_pages == 0


@asynccontextmanager
async def stack(
    *, ready: bool = True, seqs: int = 4, prepare: Callable[[FakeWorkerService], None] | None = None, **options: Any
) -> AsyncIterator[Stack]:
    flags = {name: options.pop(name) for name in list(options) if name in SchedulerConfig.__dataclass_fields__}
    name: bytes = options.pop("name", b"")
    hello = make_hello(max_num_seqs=seqs, **options)
    worker = FakeWorkerService(with_address(hello, name) if name else hello)
    if prepare is not None:
        prepare(worker)
    await worker.start()
    try:
        async with scheduler_of(worker, ready=ready, **flags) as one:
            yield one
    finally:
        await worker.stop()


@asynccontextmanager
async def scheduler_of(worker: FakeWorkerService, *, ready: bool = True, **flags: Any) -> AsyncIterator[Stack]:
    """One more scheduler for a worker that runs."""
    # Off but where a test asks for it: counted prompts are alike, and tests of the wire count what is computed.
    config = SchedulerConfig(worker=worker.address, **{"enable_prefix_caching": False, **flags})
    server = grpc.aio.server(interceptors=aio_server_interceptors(), options=SERVER_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    service = SchedulerService(config, BoundServer(f"127.0.0.1:{port}", "scheduler-test", lambda _: None))
    service.register(server)
    await server.start()
    starting = asyncio.ensure_future(service.start())
    one = Stack(worker, service, f"127.0.0.1:{port}")
    try:
        if ready:
            await asyncio.wait_for(starting, LIMIT_S)
        yield one
    finally:
        starting.cancel()
        await one.channel.close()
        await server.stop(None)
        await service.close()


class Reached(Protocol):
    """A scheduler service somewhere."""

    stub: Any


class Router:
    """One Session stream, collected."""

    def __init__(self, stack: Reached) -> None:
        self._call = stack.stub.Session()
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, int] = {}
        self.finished: dict[int, scheduler_pb2.Finished] = {}
        self.failed: dict[int, Any] = {}
        self.admitted: dict[int, scheduler_pb2.Admitted] = {}
        self.prefilled: dict[int, scheduler_pb2.Prefilled] = {}
        self.pulled: dict[int, scheduler_pb2.Pulled] = {}
        self.messages = 0
        # Messages that said nothing, and the longest time between two of any kind.
        self.beats = 0
        self.silence_s = 0.0
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> scheduler_pb2.SessionWelcome:
        await self._call.write(scheduler_pb2.SessionRequest(hello=scheduler_pb2.SessionHello(protocol_version=1)))
        first = await self._call.read()
        self._reader = asyncio.ensure_future(self._read())
        welcome: scheduler_pb2.SessionWelcome = first.welcome
        return welcome

    async def submit(
        self, sequences: dict[int, Sequence], transfer: scheduler_pb2.KvTransfer | None = None, **context: Any
    ) -> None:
        message = scheduler_pb2.SessionRequest()
        for handle, sequence in sequences.items():
            submit = message.submit.add(handle=handle)
            submit.context.CopyFrom(context_to_pb(RequestContext(f"r{handle}", **context)))
            submit.sequence.CopyFrom(sequence_to_pb(sequence))
            if transfer is not None:
                submit.transfer.CopyFrom(transfer)
        await self._call.write(message)

    async def abort(self, *handles: int) -> None:
        await self._call.write(scheduler_pb2.SessionRequest(abort=pack_i32(handles)))

    async def send(self, **fields: Any) -> None:
        await self._call.write(scheduler_pb2.SessionRequest(**fields))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                assert self._reader is not None
                if self._reader.done():
                    self._reader.result()
                await asyncio.sleep(0.005)

    async def done(self, *handles: int) -> None:
        await self.until(lambda: all(h in self.finished or h in self.failed for h in handles))

    async def half_close(self) -> None:
        await self._call.done_writing()
        assert self._reader is not None
        await asyncio.wait_for(self._reader, LIMIT_S)

    def cancel(self) -> None:
        self._call.cancel()

    async def status(self) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            while await self._call.read() is not grpc.aio.EOF:
                pass
        return from_rpc_error(caught.value)

    async def _read(self) -> None:
        heard = time.monotonic()
        while (message := await self._call.read()) is not grpc.aio.EOF:
            self.messages += 1
            self.beats += not message.ByteSize()
            self.silence_s = max(self.silence_s, time.monotonic() - heard)
            heard = time.monotonic()
            at = 0
            rows = zip(i32(message.handle).tolist(), i32(message.count).tolist(), message.finish, strict=True)
            ids = i32(message.token).tolist()
            for handle, count, finish in rows:
                self.tokens.setdefault(handle, []).extend(ids[at : at + count])
                at += count
                if finish:
                    self.finish[handle] = finish
            for finished in message.finished:
                self.finished[finished.handle] = finished
            self.admitted |= {note.handle: note for note in message.admitted}
            self.prefilled |= {note.handle: note for note in message.prefilled}
            self.pulled |= {note.handle: note for note in message.pulled}
            for failed in message.failed:
                self.failed[failed.handle] = from_message(failed.error)


class FakeKvStore(kvstore_pb2_grpc.KvStoreServicer):
    def __init__(self, pages: dict[bytes, list[int]]) -> None:
        self.pages = pages
        self.leases: set[bytes] = set()
        self.granted: list[bytes] = []
        self.released: list[bytes] = []
        self.requests: list[kvstore_pb2.LookupAndPinRequest] = []
        self.patience_s: list[float] = []
        self.hang = False
        self.release_s = 0.0
        # What it tells those who watch, if anybody can.
        self.told = FakePages(b"ns")
        self.watched = False

    async def LookupAndPin(
        self, request: kvstore_pb2.LookupAndPinRequest, context: Any
    ) -> kvstore_pb2.LookupAndPinResponse:
        self.requests.append(request)
        self.patience_s.append(context.time_remaining())
        if self.hang:
            await asyncio.Event().wait()
        found = 0
        for digest in request.keys.hashes:
            if bytes([request.keys.group]) + digest not in self.pages:
                break
            found += 1
        lease = b"lease%d" % len(self.granted) if found else b""
        if found:
            self.granted.append(lease)
            self.leases.add(lease)
        epoch = common_pb2.Epoch(boot_id=self.told.boot_id)
        return kvstore_pb2.LookupAndPinResponse(
            pages=found, lease=lease, lease_ms=request.lease_ms, epoch=epoch, watched=self.watched
        )

    async def Watch(self, request: common_pb2.WatchPagesRequest, context: Any) -> AsyncIterator[common_pb2.PageEvents]:
        async for frame in self.told.watch(request):
            yield frame

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: Any) -> kvstore_pb2.ReleaseResponse:
        await asyncio.sleep(self.release_s)
        self.released += request.leases
        self.leases.difference_update(request.leases)
        return kvstore_pb2.ReleaseResponse(released=len(request.leases))


@asynccontextmanager
async def kvstore() -> AsyncIterator[tuple[FakeKvStore, str]]:
    store = FakeKvStore({})
    server = grpc.aio.server()
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(store, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield store, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def assert_serves(s: Stack) -> None:
    await s.until(lambda: s.core is not None)
    router = Router(s)
    await router.open()
    await router.submit({1: a_sequence(4, 4)})
    await router.done(1)
    assert router.tokens[1] == undisturbed(a_sequence(4, 4))[0]

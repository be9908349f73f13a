"""The Worker contract over real gRPC, with the fake worker behind it. Can be killed, hang, fall silent, come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from quire.v1 import worker_pb2, worker_pb2_grpc
from quire_common.credit import Epoch, Report, WorkerHello, decode_grant, encode_report
from quire_common.credit.hello import epoch_to_pb, model_to_pb, worker_hello_to_pb
from quire_common.errors import ConfigError, FailedPrecondition, to_message
from quire_common.telemetry.interceptors import aio_server_interceptors
from quire_common.transport import SERVER_OPTIONS
from tests.fakes.worker.fake_worker import FakeWorker


class FakeWorkerService(worker_pb2_grpc.WorkerServicer):
    def __init__(self, hello: WorkerHello) -> None:
        self.hello = hello
        self.worker: FakeWorker | None = None
        self.store: dict[bytes, list[int]] = {}
        # Where it can pull pages from.
        self.peers: dict[bytes, FakeWorker] = {}
        self.runs = 0
        # What the scheduler that attached last said first.
        self.greeting = worker_pb2.Hello()
        self.step_s = 0.0
        # A Report comes between a Grant and its answer, as of a move that has just ended.
        self.interrupting = False
        # Cleared: Grants are read and not answered, while heartbeats go on. Load waits for `may_load`.
        self.answering = asyncio.Event()
        self.answering.set()
        self.heartbeat_s = 0.1
        # Cleared: no frame at all.
        self.beating = asyncio.Event()
        self.beating.set()
        # Cleared: a scheduler that attaches gets no hello.
        self.greets = asyncio.Event()
        self.greets.set()
        # Streams that waited for `greets`, and have ended.
        self.ungreeted = 0
        # True: the first frame of a stream is no hello, and the stream stays open.
        self.misgreets = False
        # Streams that began so.
        self.misgreeted = 0
        self.draining = False
        # Frames to be sent as they are.
        self.extra: list[Report] = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        # Cleared: Load sends nothing.
        self.tells_progress = asyncio.Event()
        self.tells_progress.set()
        # Load calls that waited for `tells_progress`, and have ended.
        self.untold = 0
        # Cleared: GetStatus waits.
        self.may_tell = asyncio.Event()
        self.may_tell.set()
        self.asked = 0
        self.attached = False
        # What GetStatus says instead of the epoch that is.
        self.told_epoch: Epoch | None = None
        self.load_error: ConfigError | None = None
        self.contexts: list[worker_pb2.Start] = []
        self.address = ""
        self._server: grpc.aio.Server | None = None
        self._last: Report | None = None
        self._epoch = hello.epoch

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = grpc.aio.server(interceptors=aio_server_interceptors(), options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def Load(self, request: worker_pb2.LoadRequest, context: Any) -> AsyncIterator[worker_pb2.LoadProgress]:
        if not self.tells_progress.is_set():
            try:
                await self.tells_progress.wait()
            finally:
                self.untold += 1
        yield worker_pb2.LoadProgress(phase="weights", done_bytes=1, total_bytes=4, detail="model.safetensors")
        await self.may_load.wait()
        if self.load_error is not None:
            yield worker_pb2.LoadProgress(error=to_message(self.load_error))
            return
        yield worker_pb2.LoadProgress(phase="ready", model=model_to_pb(self.hello.model))

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> worker_pb2.GetStatusResponse:
        self.asked += 1
        await self.may_tell.wait()
        epoch = epoch_to_pb(self.told_epoch or self._epoch)
        return worker_pb2.GetStatusResponse(epoch=epoch, phase="ready", attached=self.attached)

    async def Run(
        self, request_iterator: AsyncIterator[worker_pb2.Grant], context: Any
    ) -> AsyncIterator[worker_pb2.Report]:
        first = await anext(aiter(request_iterator))
        assert first.HasField("hello")
        if not self.greets.is_set():
            try:
                await self.greets.wait()
            finally:
                self.ungreeted += 1
        if self.misgreets:
            self.misgreeted += 1
            yield worker_pb2.Report(heartbeat=True)
            await asyncio.Event().wait()
        self.greeting = first.hello
        self.runs += 1
        self._last = None
        self._epoch = epoch = Epoch(self.hello.epoch.boot_id, self.runs)
        self.attached = True
        hello = replace(self.hello, epoch=epoch)
        rng = np.random.default_rng(self.runs)
        self.worker = worker = FakeWorker(hello, store=self.store, rng=rng, peers=self.peers)
        yield worker_pb2.Report(hello=worker_hello_to_pb(hello))
        wake = asyncio.Event()
        reader = asyncio.ensure_future(self._read(request_iterator, worker, wake))
        try:
            while not reader.done():
                if self._epoch != epoch:
                    raise FailedPrecondition("SCHEDULER_REPLACED", "Another scheduler attached.", "Run one.")
                frames = await self._turn(worker, wake)
                await self.beating.wait()
                for frame in frames:
                    yield encode_report(frame)
        finally:
            reader.cancel()
            if self._epoch == epoch:
                # As the real one: when its scheduler goes, another run begins.
                self.attached = False
                self.runs += 1
                self._epoch = Epoch(epoch.boot_id, self.runs)

    async def _read(self, grants: AsyncIterator[worker_pb2.Grant], worker: FakeWorker, wake: asyncio.Event) -> None:
        async for message in grants:
            self.contexts += message.start
            worker.deliver(decode_grant(message))
            if self.interrupting:
                self.extra.append(Report(epoch=worker.hello.epoch))
            wake.set()
        wake.set()

    async def _turn(self, worker: FakeWorker, wake: asyncio.Event) -> list[Report]:
        """Reports of one boundary; after a while without one, a heartbeat."""
        frames, self.extra = self.extra, []
        wake.clear()
        report = worker.step() if self.answering.is_set() else None
        if report is not None:
            report.draining = self.draining
            self._last = report
            if self.step_s:
                await asyncio.sleep(self.step_s)
            return [*frames, report]
        if worker.moving and self.answering.is_set():
            # Moves in flight go on by themselves.
            await asyncio.sleep(0.001)
            return frames
        if not frames:
            try:
                await asyncio.wait_for(wake.wait(), self.heartbeat_s)
            except TimeoutError:
                retired = 0 if self._last is None else self._last.retired
                frames = [Report(worker.hello.epoch, retired=retired, heartbeat=True, draining=self.draining)]
        return frames

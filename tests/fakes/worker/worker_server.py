"""A worker service on a real port with a counting model, and a scheduler's hand on its Run stream."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent import futures
from types import TracebackType

import grpc

from quire.v1 import worker_pb2, worker_pb2_grpc
from quire_common.credit import (
    Grant,
    KvGroup,
    ModelInfo,
    PageGeometry,
    Report,
    WorkerHello,
    decode_report,
    encode_grant,
)
from quire_common.credit.hello import scheduler_hello, worker_hello_from_pb
from quire_common.errors import QuireError
from quire_common.serving.server import BoundServer
from quire_common.telemetry.interceptors import sync_server_interceptors
from quire_common.transport import SERVER_OPTIONS
from quire_worker.config import WorkerConfig
from quire_worker.replica import ServedModel, from_host, on_host
from quire_worker.server import WorkerService
from tests.fakes.worker.counting_runner import CountingRunner

WAIT_S = 30.0
VOCAB = 97
Progress = Callable[[str, int, int], None]


def counting_info(page_size: int = 4, max_model_len: int = 64) -> ModelInfo:
    group = KvGroup("full", page_size * 4, "token", "int32", 1, 1, 1)
    return ModelInfo(
        "counting", "Counting", max_model_len, VOCAB, (), b"d" * 16, PageGeometry(page_size, (group,), b"n" * 32)
    )


def counting_model(runner: CountingRunner | None = None, num_pages: int = 64) -> ServedModel:
    runner = runner or CountingRunner(num_pages, 4, VOCAB)
    return ServedModel(on_host(runner), from_host(runner), counting_info(), num_pages)


class WorkerServer:
    """`with WorkerServer() as worker`: loads at once unless a load of the test's own is given."""

    def __init__(
        self,
        load: Callable[[WorkerConfig, Progress], ServedModel] = lambda config, progress: counting_model(),
        config: WorkerConfig = WorkerConfig(model="counting", max_num_seqs=4),  # noqa: B008 - frozen
        start: bool = True,
    ) -> None:
        self.failed: list[QuireError] = []
        self._server = grpc.server(
            futures.ThreadPoolExecutor(8), interceptors=sync_server_interceptors("worker"), options=SERVER_OPTIONS
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.service = WorkerService(config, BoundServer(self.address, "worker-test", self.failed.append), load)
        self._start = start

    def __enter__(self) -> WorkerServer:
        assert list(self.service.register(self._server)) == ["quire.v1.Worker"]
        self._server.start()
        if self._start:
            self.service.start()
        self._channel = grpc.insecure_channel(self.address)
        self.stub = worker_pb2_grpc.WorkerStub(self._channel)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        self._server.stop(1.0).wait()
        self.service.close()


class FakeScheduler:
    """Attaches at once; `send` Grants, `next_report` waits for one that is no heartbeat."""

    def __init__(self, stub: worker_pb2_grpc.WorkerStub, hello: worker_pb2.Grant | None = None) -> None:
        self._outgoing: queue.SimpleQueue[worker_pb2.Grant | None] = queue.SimpleQueue()
        self._outgoing.put(scheduler_hello() if hello is None else hello)
        self.call: Iterator[worker_pb2.Report] = stub.Run(iter(self._outgoing.get, None), timeout=WAIT_S)
        self.seq = 0

    def attach(self) -> WorkerHello:
        self.hello = worker_hello_from_pb(next(self.call).hello)
        return self.hello

    def send(self, grant: Grant) -> None:
        self._outgoing.put(encode_grant(grant))

    def send_raw(self, message: worker_pb2.Grant) -> None:
        self._outgoing.put(message)

    def grant(self, **parts: object) -> None:
        """The next Grant of this run."""
        self.seq += 1
        self.send(Grant(self.hello.epoch, self.seq, **parts))  # type: ignore[arg-type]  # fields of Grant by name

    def next_report(self) -> Report:
        while (report := self.next_frame()).heartbeat:
            pass
        return report

    def next_frame(self) -> Report:
        return decode_report(next(self.call))

    def half_close(self) -> None:
        self._outgoing.put(None)

    def cancel(self) -> None:
        self.call.cancel()  # type: ignore[attr-defined]  # a grpc call
        self._outgoing.put(None)

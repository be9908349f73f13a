"""grpc.health.v1 of a scheduler follows its worker: a replica without one must not be sent requests by a mesh."""

from __future__ import annotations

import asyncio
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.worker.fake_worker import make_hello
from tests.fakes.worker.fake_worker_service import FakeWorkerService
from tests.held_ports import held_ports

LIMIT_S = 60.0
Status = health_pb2.HealthCheckResponse


async def test_scheduler_health_follows_the_worker() -> None:
    worker = FakeWorkerService(make_hello(max_num_seqs=4))
    worker_address = await worker.start()
    (port,) = held_ports(1)
    command = [sys.executable, "-m", "quire_scheduler", "--listen", f"127.0.0.1:{port}", "--worker", worker_address]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(LIMIT_S):
            stub = health_pb2_grpc.HealthStub(channel)
            await until(stub, Status.SERVING)
            await worker.stop()
            await until(stub, Status.NOT_SERVING)
            await worker.start(worker_address)
            await until(stub, Status.SERVING)
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
        await worker.stop()


async def until(stub: health_pb2_grpc.HealthStub, wanted: int) -> None:
    request = health_pb2.HealthCheckRequest(service="quire.v1.Scheduler")
    while (await stub.Check(request, wait_for_ready=True)).status != wanted:
        await asyncio.sleep(0.02)

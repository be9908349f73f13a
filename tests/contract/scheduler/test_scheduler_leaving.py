"""A scheduler that is told to end says so at once, and takes requests of routers that have not heard of it yet."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import dataclass

import grpc

from quire.v1 import scheduler_pb2 as pb
from quire.v1 import scheduler_pb2_grpc
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.scheduler.scheduler_stack import Router
from tests.fakes.worker.fake_worker import make_hello, undisturbed
from tests.fakes.worker.fake_worker_service import FakeWorkerService
from tests.held_ports import held_ports

LIMIT_S = 60.0
DELAY_S = 2.0


@dataclass
class Reached:
    """A scheduler process, as `Router` wants it."""

    stub: scheduler_pb2_grpc.SchedulerStub


async def test_leaving_scheduler_says_draining_and_still_takes_requests() -> None:
    worker = FakeWorkerService(make_hello(max_num_seqs=4))
    address = await worker.start()
    (port,) = held_ports(1)
    flags = ["--listen", f"127.0.0.1:{port}", "--worker", address, "--drain-delay-s", str(DELAY_S)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "quire_scheduler", *flags, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(LIMIT_S):
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            loads = stub.WatchLoad(pb.WatchLoadRequest(interval_ms=20), wait_for_ready=True)
            async for load in loads:
                if load.phase == "ready":
                    break
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            async for load in loads:
                if load.phase == "draining":
                    break
            assert time.monotonic() - began < DELAY_S / 2
            router = Router(Reached(stub))
            await router.open()
            await router.submit({1: a_sequence(5, 4)})
            await router.done(1)
            assert router.tokens[1] == undisturbed(a_sequence(5, 4))[0], "it refuses before its delay has passed"
            router.cancel()
            await asyncio.sleep(began + DELAY_S + 0.3 - time.monotonic())
            loads.cancel()
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
        assert time.monotonic() - began >= DELAY_S
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await worker.stop()

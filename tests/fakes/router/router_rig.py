"""A router over real sockets in the test's own loop, with fakes behind it and clients before it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quire.v1 import inference_pb2_grpc
from quire_common.serving.health import AioHealth
from quire_common.serving.server import BoundServer, public_server
from quire_common.telemetry.interceptors import CallGate
from quire_router.config import RouterConfig
from quire_router.front.grpc.grpc_limits import grpc_limits
from quire_router.server import RouterService
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.grpc_host import GrpcHost
from tests.fakes.router.api_document import check_answer
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

ALL_ACCEPT_S = 2.0


@dataclass
class RouterRig:
    router: RouterService
    http: httpx.AsyncClient
    inference: inference_pb2_grpc.InferenceStub
    grpc_address: str
    schedulers: list[FakeScheduler]
    tokenizers: list[FakeTokenizer]
    scheduler_hosts: list[GrpcHost] = field(default_factory=list)
    tokenizer_hosts: list[GrpcHost] = field(default_factory=list)

    @property
    def scheduler(self) -> FakeScheduler:
        return self.schedulers[0]

    @property
    def tokenizer(self) -> FakeTokenizer:
        return self.tokenizers[0]

    async def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "fake", "prompt": prompt, **fields})

    async def chat(self, content: Any, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return await self.http.post("/v1/chat/completions", json={"model": "fake", "messages": messages, **fields})


async def _all_accept(router: RouterService, count: int) -> None:
    """Wait until this many replicas accept requests: a router is ready with one. Some fakes never do, so not long."""
    deadline = time.monotonic() + ALL_ACCEPT_S
    while sum(replica.accepts for replica in router.fleet.replicas.values()) < count and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def router_rig(
    schedulers: Sequence[FakeScheduler] | None = None,
    tokenizers: Sequence[FakeTokenizer] | None = None,
    *,
    further: Sequence[str] = (),
    further_tokenizers: Sequence[str] = (),
    wait_ready: bool = True,
    **config: Any,
) -> AsyncIterator[RouterRig]:
    """`further`, `further_tokenizers`: where there are more of them."""
    schedulers = [FakeScheduler()] if schedulers is None else list(schedulers)
    tokenizers = [FakeTokenizer()] if tokenizers is None else list(tokenizers)
    async with contextlib.AsyncExitStack() as stack:
        scheduler_hosts = [await stack.enter_async_context(GrpcHost(fake.add)) for fake in schedulers]
        tokenizer_hosts = [await stack.enter_async_context(GrpcHost(fake.add)) for fake in tokenizers]
        options = RouterConfig(
            **{
                "port": 0,
                "schedulers": (*(host.address for host in scheduler_hosts), *further),
                "tokenizers": (*(host.address for host in tokenizer_hosts), *further_tokenizers),
                **config,
            }
        )
        gate = CallGate()
        server = public_server(grpc_limits(options), gate)
        port = server.add_insecure_port("127.0.0.1:0")
        address = f"127.0.0.1:{port}"
        checker = AioHealth()
        bound = BoundServer(address, "router-test", lambda error: None, checker.set_serving, gate)
        router = RouterService(options, bound)
        names = router.register(server)
        await checker.watch(names)
        health_pb2_grpc.add_HealthServicer_to_server(checker, server)
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
        await server.start()
        stack.push_async_callback(router.close)
        stack.push_async_callback(server.stop, 0)
        starting = asyncio.ensure_future(router.start())
        stack.callback(starting.cancel)
        if wait_ready:
            await asyncio.wait_for(starting, 60)
            await checker.ready()
            await _all_accept(router, len(schedulers))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        http = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=f"http://{router.http.address}",
                timeout=60,
                trust_env=False,
                event_hooks={"response": [check_answer]},
            )
        )
        yield RouterRig(
            router,
            http,
            inference_pb2_grpc.InferenceStub(channel),
            address,
            schedulers,
            tokenizers,
            scheduler_hosts,
            tokenizer_hosts,
        )

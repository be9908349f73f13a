"""A router that is told to end: it says so, serves those who have not heard of it, refuses the others, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import httpx
import pytest

from quire import AsyncClient, SamplingParams
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.grpc_host import GrpcHost
from tests.fakes.scheduler.fake_scheduler import FakeScheduler
from tests.router_process import RouterProcess, is_ready
from tests.tcp_relay import TcpRelay

LIMIT_S = 60.0
CLIENTS = 8
# So late a client hears of a router's readiness.
LATE_S = 1.0
BODY = {"prompt": "ab", "max_tokens": 20, "stream": True}


@contextlib.asynccontextmanager
async def routers(count: int, *flags: str, step_s: float = 0.005) -> AsyncIterator[list[RouterProcess]]:
    """So many routers before one scheduler and one tokenizer."""
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(GrpcHost(FakeScheduler(step_s=step_s).add))
        tokenizer = await stack.enter_async_context(GrpcHost(FakeTokenizer().add))
        peers = [f"--schedulers={scheduler.address}", f"--tokenizers={tokenizer.address}"]
        yield [await stack.enter_async_context(RouterProcess([*peers, *flags])) for _ in range(count)]


class LateClients:
    """Clients that ask the routers they believe to be ready, in turn, and never retry. They hear of a router's
    readiness LATE_S after it has changed."""

    def __init__(self, routers: Sequence[RouterProcess]) -> None:
        self.errors: list[str] = []
        self.answers = 0
        # Answers of routers that had been told to end, and how many of all answers closed their connection.
        self.late = self.last_answers = 0
        self.leaving: set[RouterProcess] = set()
        self._routers = list(routers)
        self._believed = dict.fromkeys(routers, True)
        self._turn = 0

    def believes(self, router: RouterProcess) -> bool:
        return self._believed[router]

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """They ask while this lasts; the answers under way at its end are awaited."""
        ending = asyncio.Event()
        probes = [asyncio.create_task(self._probe(router)) for router in self._routers]
        clients = [asyncio.create_task(self._ask_on(ending)) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            ending.set()
            await asyncio.gather(*clients)
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def _probe(self, router: RouterProcess) -> None:
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(trust_env=False, base_url=router.http) as client:
            while True:
                loop.call_later(LATE_S, self._believed.__setitem__, router, await is_ready(client))
                await asyncio.sleep(0.05)

    async def _ask_on(self, ending: asyncio.Event) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
            while not ending.is_set():
                self._turn += 1
                believed = [router for router in self._routers if self._believed[router]]
                await self._ask(client, believed[self._turn % len(believed)])

    async def _ask(self, client: httpx.AsyncClient, router: RouterProcess) -> None:
        late = router in self.leaving
        try:
            answer = await client.post(f"{router.http}/v1/completions", json=BODY)
        except httpx.HTTPError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.05)
            return
        if answer.status_code != httpx.codes.OK or not answer.text.endswith("data: [DONE]\n\n"):
            self.errors.append(f"{answer.status_code}: {answer.text[-200:]}")
            await asyncio.sleep(0.05)
            return
        self.answers += 1
        self.late += late
        self.last_answers += answer.headers.get("connection") == "close"


async def roll(routers: Sequence[RouterProcess], clients: LateClients) -> None:
    """Restart one router after the other; the next one's turn comes when clients know that the last one is back."""
    for router in routers:
        clients.leaving.add(router)
        assert await router.end() == 0
        clients.leaving.discard(router)
        await router.start()
        async with asyncio.timeout(LIMIT_S):
            while not clients.believes(router):
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)


@pytest.mark.deep
@pytest.mark.parametrize("flags", [(), ("--http-workers=2",)], ids=["one-process", "two-processes"])
async def test_rolling_restart_of_two_routers_costs_late_clients_nothing(flags: tuple[str, ...]) -> None:
    async with routers(2, f"--drain-delay-s={2 * LATE_S}", *flags) as both:
        clients = LateClients(both)
        async with clients.at_work():
            await asyncio.sleep(0.5)
            await roll(both, clients)
        print(
            f"{clients.answers} answers, {clients.late} of leaving routers, {clients.last_answers} closed connections"
        )
        assert clients.errors == []
        assert clients.late > 0
        assert clients.last_answers > 0


@pytest.mark.deep
async def test_rolling_restart_without_a_delay_costs_late_clients_answers() -> None:
    """What the delay is for: without it, the same clients see errors."""
    async with routers(2) as both:
        clients = LateClients(both)
        async with clients.at_work():
            await roll(both[:1], clients)
        assert clients.errors


async def test_a_leaving_router_serves_then_refuses_and_closes_connections() -> None:
    async with routers(1, "--drain-delay-s=1.5", step_s=0.05) as (router,):
        limits = httpx.Limits(max_connections=1)
        async with (
            httpx.AsyncClient(trust_env=False, base_url=router.http, timeout=LIMIT_S) as probe,
            httpx.AsyncClient(trust_env=False, base_url=router.http, timeout=LIMIT_S) as http,
            httpx.AsyncClient(trust_env=False, base_url=router.http, timeout=LIMIT_S, limits=limits) as idle,
            AsyncClient(router.grpc) as client,
        ):
            assert (await idle.get("/health")).headers.get("connection") is None
            # This stream lasts beyond the delay, into the drain.
            params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
            streams = asyncio.gather(
                http.post("/v1/completions", json={**BODY, "max_tokens": 60}), client.complete("ab", params)
            )
            await asyncio.sleep(0.5)
            router.send(signal.SIGTERM)
            began = time.monotonic()
            while (ready := await probe.get("/readyz")).status_code == httpx.codes.OK:
                assert time.monotonic() - began < 1.0
            assert ready.json()["router"]["phase"] == "draining"
            assert ready.headers["connection"] == "close"
            assert (await probe.get("/health")).status_code == httpx.codes.SERVICE_UNAVAILABLE
            served = await probe.post("/v1/completions", json={**BODY, "max_tokens": 2})
            assert (served.status_code, served.headers["connection"]) == (200, "close")
            while (refused := await probe.post("/v1/completions", json=BODY)).status_code == httpx.codes.OK:
                assert time.monotonic() - began < 10
            assert time.monotonic() - began >= 1.5
            assert json.loads(refused.text)["error"]["code"] == "DRAINING"
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert int(refused.headers["retry-after"]) >= 1
            answer, output = await streams
            assert answer.text.endswith("data: [DONE]\n\n")
            assert len(output.outputs[0].token_ids) == 60
        assert await router.end() in (0, -signal.SIGTERM)


async def test_grpc_health_says_that_a_router_leaves() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with routers(1, "--drain-delay-s=1") as (router,), grpc.aio.insecure_channel(router.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        router.send(signal.SIGTERM)
        await asyncio.sleep(0.3)
        said = await health.Check(health_pb2.HealthCheckRequest())
        assert said.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_grpc_clients_connect_anew_when_their_router_drains() -> None:
    """Behind a load balancer that no longer sends connections to it, a client that stays connected leaves it too."""
    async with routers(2, "--drain-delay-s=0.2", step_s=0.05) as (first, second):
        with TcpRelay(("127.0.0.1", first.grpc_port)) as balancer:
            async with AsyncClient(f"127.0.0.1:{balancer.port}") as client, AsyncClient(client.address) as other:
                long, short = (SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for n in (80, 2))
                running = asyncio.create_task(client.complete("ab", long))
                await other.complete("ab", short)
                balancer.target = ("127.0.0.1", second.grpc_port)
                first.send(signal.SIGTERM)
                await asyncio.sleep(0.5)
                for each in (client, other, client, other):
                    assert len((await each.complete("ab", short)).outputs[0].token_ids) == 2
                assert not running.done(), "calls waited for the end of the one that ran"
                assert len((await running).outputs[0].token_ids) == 80

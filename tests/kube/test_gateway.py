"""Envoy with the chart's routes, probes and drain before two real routers: one ends under load, and nobody notices."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import httpx
import pytest

from quire.local.ports import free_ports
from tests.chaos.routers.envoy import Envoy, envoy_binary, run_envoy
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.grpc_host import GrpcHost
from tests.fakes.scheduler.fake_scheduler import FakeScheduler
from tests.kube.callers import CLIENTS, HTTP_HOST, ROUTES, Callers
from tests.kube.chart import CHART, Manifest, flags_of, one, render
from tests.kube.gateway import config_of
from tests.router_process import RouterProcess

pytestmark = pytest.mark.slow


def rendered(retries: int) -> list[Manifest]:
    return render(CHART / "values-cpu.yaml", values={"gateway": ROUTES | {"retries": retries}})


def probe_s(manifests: list[Manifest]) -> float:
    """The longest time in which the routers' readiness probe notices."""
    probe = one(manifests, "Deployment", "router")["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]
    return float(probe["periodSeconds"] * probe["failureThreshold"])


@contextlib.asynccontextmanager
async def behind_envoy(retries: int) -> AsyncIterator[tuple[Envoy, list[RouterProcess], float]]:
    """Envoy, the two routers behind it, and the time in which Envoy notices a change."""
    if not envoy_binary():
        pytest.skip("there is no Envoy: `make kube` fetches it")
    manifests = rendered(retries)
    container = one(manifests, "Deployment", "router")["spec"]["template"]["spec"]["containers"][0]
    drain = [f"--{name}={flags_of(container)[name]}" for name in ("drain-delay-s", "drain-timeout-s")]
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(GrpcHost(FakeScheduler(step_s=0.005).add))
        tokenizer = await stack.enter_async_context(GrpcHost(FakeTokenizer().add))
        peers = [f"--schedulers={scheduler.address}", f"--tokenizers={tokenizer.address}", *drain]
        routers = [await stack.enter_async_context(RouterProcess(peers)) for _ in range(2)]
        http = [("127.0.0.1", each.http_port) for each in routers]
        rpc = [("127.0.0.1", each.grpc_port) for each in routers]
        port, admin_port = free_ports(2)
        text = config_of(
            manifests, {("quire-router", 8000): http, ("quire-router", 50050): rpc}, http, port, admin_port
        )
        envoy = Envoy(
            f"http://127.0.0.1:{port}", f"127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", "quire-router:8000"
        )
        await stack.enter_async_context(run_envoy(envoy, text, port))
        yield envoy, routers, probe_s(manifests)


async def test_no_answer_is_lost_when_a_router_is_killed() -> None:
    async with behind_envoy(retries=3) as (envoy, routers, notice_s):
        callers = Callers(envoy, rpc=False)
        async with callers.at_work():
            for router in routers:
                await asyncio.sleep(1.0)
                await router.end(signal.SIGKILL)
                await router.start()
                await asyncio.sleep(2 * notice_s)
        print(f"SIGKILL: {callers.answers} answers, {len(callers.errors)} errors")
        assert callers.errors == [] and callers.answers["http"] > CLIENTS


async def test_no_answer_by_http_or_grpc_is_lost_when_a_router_drains() -> None:
    """Without retries: the delay of the chart is longer than its probe takes to notice."""
    async with behind_envoy(retries=0) as (envoy, routers, notice_s):
        callers = Callers(envoy, rpc=True)
        async with callers.at_work():
            for router in routers:
                await asyncio.sleep(1.0)
                assert await router.end(signal.SIGTERM) == 0
                await router.start()
                await asyncio.sleep(2 * notice_s)
        print(f"SIGTERM: {callers.answers} answers, {len(callers.errors)} errors")
        assert callers.errors == [] and min(callers.answers.values()) > CLIENTS


async def test_a_killed_router_costs_answers_without_retries() -> None:
    """The first test can fail."""
    async with behind_envoy(retries=0) as (envoy, routers, _):
        callers = Callers(envoy, rpc=False)
        async with callers.at_work():
            await asyncio.sleep(1.0)
            await routers[0].end(signal.SIGKILL)
            await asyncio.sleep(1.0)
        assert callers.errors


async def test_paths_and_hosts_that_no_route_has_lead_nowhere() -> None:
    async with (
        behind_envoy(retries=0) as (envoy, _, _),
        httpx.AsyncClient(trust_env=False, base_url=envoy.url) as client,
    ):
        for host, path, status in (
            (HTTP_HOST, "/health", 200),
            (HTTP_HOST, "/v1/models", 200),
            (HTTP_HOST, "/metrics", 404),
            (HTTP_HOST, "/v1x", 404),
            ("other.example.org", "/v1/models", 404),
        ):
            answer = await client.get(path, headers={"Host": host})
            assert answer.status_code == status, (host, path)

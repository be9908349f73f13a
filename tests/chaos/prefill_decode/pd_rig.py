"""PdRig: prefill and decode replicas, relays before some workers' pages, and moments of their transfers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

import grpc

from quire.errors import FailedPrecondition
from quire.local.ports import free_ports
from quire.local.private_network import PrivateNetwork
from quire.local.spec import StackSpec, role_of
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.chaos.prefill_decode.crowd import Crowd
from tests.chaos.rig import Rig
from tests.tcp_relay import TcpRelay

Flags = dict[str, dict[str, str | bool]]
# What is lent and referenced must be back so soon after the last answer.
BACK_S = 5.0
_LOOK_MS = 10
_LIMIT_S = 60.0
# Any prompt of some pages is prefilled elsewhere, however idle the decode side is.
_SPLIT: dict[str, str | bool] = {"pd-threshold-tokens": "64", "pd-least-tokens": "64", "pd-by-rates": False}
# So is one that was asked before.
NO_CACHES: Flags = {
    "scheduler": {"enable-prefix-caching": False, "kvstore-min-tokens": "1000000"},
    "router": {"expected-pages-s": "0.1"},
}
_HERE, _RELAYED = "127.0.0.1", "127.0.0.2"


def flags_of(prefill_us: float = 0.0, *more: Mapping[str, Mapping[str, str | bool]]) -> Flags:
    """Of a paced stack whose prompts take so long a token; prompts go to the prefill side whenever they can."""
    flags: Flags = {"router": {**_SPLIT}}
    if prefill_us:
        flags["worker"] = {"paced-prefill-us-per-token": f"{prefill_us:g}"}
    for extra in more:
        for name, own in extra.items():
            flags.setdefault(name, {}).update(own)
    return flags


@contextmanager
def private_network(prefill: int = 2, decode: int = 2) -> Iterator[PrivateNetwork | None]:
    """Of a rig of this size; None where that is not allowed, which is said."""
    spec = StackSpec("names", "", replicas=0, prefill=prefill, decode=decode)
    try:
        network = PrivateNetwork(spec.members)
    except FailedPrecondition as error:
        print(f"\nwithout network namespaces: {error.message}")
        yield None
        return
    with network:
        yield network


class PdRig(Rig):
    """A context, as Rig. Pages of the workers in `relayed` go through `relays`, by TCP."""

    def __init__(
        self,
        engine: str,
        *,
        prefill: int = 2,
        decode: int = 2,
        flags: Flags | None = None,
        network: PrivateNetwork | None = None,
        relayed: Sequence[str] = (),
    ) -> None:
        self.relays: dict[str, TcpRelay] = {}
        # What befell so far: rows, requests of crowds, those that went wrong, rows after which something was kept, and
        # the longest that it took to come back, of all once they served again and of those that nothing befell.
        self.rows = self.asked = self.failed = self.leaks = 0
        self.back_s = self.spared_s = 0.0
        self._relayed = ExitStack()
        merged: Flags = {name: {**own} for name, own in (flags or flags_of()).items()}
        for name, port in zip(relayed, free_ports(len(relayed)), strict=True):
            own, near = (_HERE, _RELAYED) if network is None else (network.hosts[name], network.gateway)
            self.relays[name] = self._relayed.enter_context(TcpRelay((own, port), host=near, port=port))
            told = {"peer-listen": f"{own}:{port}", "peer-advertise": near}
            merged.setdefault(name, {}).update(told)
            merged.setdefault("worker", {})["peer-transport"] = "tcp"
        if relayed and network is not None:
            members = StackSpec(engine, "", replicas=0, prefill=prefill, decode=decode).members_of("worker")
            hosts = [network.gateway, *(network.hosts[name] for name in members)]
            merged["worker"]["peer-hosts"] = ",".join(hosts)
        try:
            super().__init__(
                engine, replicas=0, tokenizers=1, flags=merged, network=network, prefill=prefill, decode=decode
            )
        except BaseException:
            self._relayed.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._relayed:
            try:
                print(await self.summary(), flush=True)
            finally:
                await super().__aexit__(kind, error, trace)

    async def summary(self) -> str:
        """For the log."""
        handoffs = await self.router_counts("quire_router_pd_handoffs_total")
        failures = await self.router_counts("quire_router_pd_pull_failures_total")
        pages = (await self.router_metrics()).get("quire_router_pd_pulled_pages_total", 0.0)
        ways = ", ".join(f"{count:.0f} {how}" for how, count in handoffs.items())
        return (
            f"\n{self.rows} times at rest after {self.asked} requests of crowds: {self.failed} client errors or wrong "
            f"tokens, {self.leaks} leaks, all back within {self.back_s:.2f} s, where nothing befell "
            f"within {self.spared_s:.2f} s of the last answer\n"
            f"handoffs: {ways}; {pages:.0f} pages pulled, pulls that brought less: {failures}"
        )

    @contextmanager
    def relayed_as(self, mode: str, *names: str) -> Iterator[None]:
        """What relays do to pages of these workers, of all that have one by default."""
        relays = [self.relays[name] for name in names or self.relays]
        for relay in relays:
            relay.mode = mode
        try:
            yield
        finally:
            for relay in relays:
                relay.mode = "pass"

    async def judge(self, crowd: Crowd, struck: Collection[str] = ()) -> None:
        """Of a row: every client got what an undisturbed run gives, and nothing is kept anywhere. `struck`: members
        that something befell, and does no more; replicas of others wait for nobody's return to give all back."""
        await crowd.done()
        errors, wrong = crowd.errors(), crowd.wrong()
        self.asked += len(crowd.asked)
        self.failed += len(errors) + len(wrong)
        assert not errors and not wrong, "\n".join([*errors, "wrong tokens:", *wrong])
        self.spared_s = max(self.spared_s, await self._back(self.spared(struck)))
        await self.assert_at_rest()

    def spared(self, struck: Collection[str]) -> list[str]:
        """Schedulers that, like their workers, are none of these."""
        hurt = {name.partition("-")[2] for name in struck}
        return [name for name in self.stack.spec.members_of("scheduler") if name.partition("-")[2] not in hurt]

    def of_role(self, service: str, role: str) -> list[str]:
        """Members by what they do."""
        return [name for name in self.stack.spec.members_of(service) if role_of(name) == role]

    async def until_load(
        self, role: str, wanted: Callable[[Sequence[scheduler_pb2.Load]], bool], limit_s: float = _LIMIT_S
    ) -> None:
        """Look closely at the schedulers of a role until their loads are as wanted."""
        names, loads = self.of_role("scheduler", role), dict[str, scheduler_pb2.Load]()
        news = asyncio.Event()

        async def follow(name: str) -> None:
            async with grpc.aio.insecure_channel(self.address(name)) as channel:
                request = scheduler_pb2.WatchLoadRequest(interval_ms=_LOOK_MS)
                async for load in scheduler_pb2_grpc.SchedulerStub(channel).WatchLoad(request):
                    loads[name] = load
                    news.set()

        tasks = [asyncio.create_task(follow(name)) for name in names]
        try:
            async with asyncio.timeout(limit_s):
                while len(loads) < len(names) or not wanted(list(loads.values())):
                    news.clear()
                    await news.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def assert_at_rest(self) -> None:
        """All members serve, and within seconds nothing is kept anywhere: no page, no lease, no transfer."""
        await self.wait_whole()
        self.back_s = max(self.back_s, await self._back())
        self.rows += 1

    async def _back(self, schedulers: Sequence[str] = ()) -> float:
        """How long it takes until these, by default all, keep nothing."""
        began_s = time.monotonic()
        try:
            await asyncio.to_thread(self.wait_pages_back, BACK_S, schedulers)
        except AssertionError:
            self.leaks += 1
            raise
        return time.monotonic() - began_s

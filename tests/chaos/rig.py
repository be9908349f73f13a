"""Rig: a stack of two replicas and two tokenizers, and what a saboteur and a judge must know of it from outside."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import httpx
import psutil

from quire.local import service_tls
from quire.local.private_network import PrivateNetwork
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.local.state import ServiceState, StackState
from quire.models import find_model
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.pipeline.leftovers import assert_nothing_left

LIMIT_S = 120.0
POLL_S = 0.05
# However little time is left, one look is taken.
_LOOK_S = 0.5
_METRIC = re.compile(r"^([a-z_]+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


def flags_of(engine: str) -> dict[str, dict[str, str]]:
    """`cpu`: the demo model. `paced MS`: the paced worker with the demo model's tokenizer and sizes."""
    name, _, step_ms = engine.partition(" ")
    if name == "cpu":
        return {"worker": {"max-num-seqs": "16", "torch-threads": "1"}}
    return {"worker": {"paced": step_ms, "max-num-seqs": "64"}}


class Rig:
    """A context. What it says of the stack is read anew each time."""

    def __init__(
        self,
        engine: str,
        *,
        replicas: int = 2,
        tokenizers: int = 2,
        drain_timeout_s: float = 20.0,
        flags: Mapping[str, Mapping[str, str | bool]] | None = None,
        model: str = "",
        api_keys: Sequence[str] = (),
        network: PrivateNetwork | None = None,
        **stack: Any,
    ) -> None:
        """`network` takes its members in, and ends with it; `stack`: further fields of the StackSpec."""
        merged: dict[str, dict[str, str | bool]] = {name: {**own} for name, own in flags_of(engine).items()}
        for service, extra in (flags or {}).items():
            merged.setdefault(service, {}).update(extra)
        spec = StackSpec(
            f"chaos-{os.getpid()}",
            model or str(find_model(None)),
            api_keys=tuple(api_keys),
            replicas=replicas,
            tokenizers=tokenizers,
            flags=merged,
            drain_timeout_s=drain_timeout_s,
            restart_delay_s=0.5,
            **stack,
        )
        self.engine = engine
        self.network = network
        self.stack = LocalStack(spec if network is None else spec.in_network(network))
        self.http = httpx.AsyncClient(base_url=self.stack.ready.http, timeout=LIMIT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state = self.state()
        await self.http.aclose()
        await asyncio.to_thread(self.stack.close)
        if error is None:
            assert self.stack.failure is None
            assert_nothing_left(state)

    @property
    def members(self) -> tuple[str, ...]:
        return self.stack.spec.members

    def state(self) -> StackState:
        state = self.stack.directory.read()
        assert state is not None
        return state

    def service(self, member: str) -> ServiceState:
        return self.state().services[member]

    def address(self, member: str) -> str:
        """Of its gRPC."""
        return f"{self.stack.spec.reached_at(member)}:{self.service(member).port}"

    def serves(self, member: str) -> bool:
        """Whether its supervisor has seen the present process serve."""
        service = self.service(member)
        return service.phase == "ready" and service.process.alive()

    async def healthy(self) -> set[str]:
        """Schedulers that take requests and tokenizers that answer, as the router sees them."""
        return await self.seen_by(self.http)

    async def seen_by(self, router: httpx.AsyncClient) -> set[str]:
        """The same, as one router sees it."""
        body = (await router.get("/readyz")).json()
        schedulers = {s["instance"] for s in body["schedulers"] if (s["phase"], s["session"]) == ("ready", "open")}
        return schedulers | {t["instance"] for t in body["tokenizers"] if t["phase"] == "ready"}

    async def is_whole(self) -> bool:
        """Whether every member serves, and the router knows."""
        if not all(map(self.serves, self.members)):
            return False
        kinds = map(self.stack.spec.members_of, ("scheduler", "tokenizer"))
        # One alone is known to it by its address.
        wanted = {member if len(kind) > 1 else self.address(member) for kind in kinds for member in kind}
        return wanted <= await self.healthy()

    async def wait_whole(self, limit_s: float = LIMIT_S) -> None:
        """Until the stack is whole."""
        deadline = time.monotonic() + limit_s
        while not await self.is_whole():
            assert time.monotonic() < deadline, f"not whole after {limit_s} s: {self.state().services}"
            await asyncio.sleep(POLL_S)

    def wait_pages_back(self, limit_s: float = 60.0, schedulers: Sequence[str] = ()) -> None:
        """Until none of these schedulers, by default of all, runs, waits for, references, fences or lends anything."""
        until = time.monotonic() + limit_s
        for name in schedulers or self.stack.spec.members_of("scheduler"):
            with service_tls.sync_channel(self.address(name), "scheduler", self.stack.spec.tls_folder) as channel:
                loads = scheduler_pb2_grpc.SchedulerStub(channel).WatchLoad(
                    scheduler_pb2.WatchLoadRequest(interval_ms=20), timeout=max(until - time.monotonic(), _LOOK_S)
                )
                last = None
                try:
                    for last in loads:
                        busy = last.running or last.waiting or last.referenced_pages or last.open_transfers
                        if not busy and last.pages and last.free_pages == last.pages:
                            break
                except grpc.RpcError as error:
                    raise AssertionError(f"{name} keeps pages after {limit_s} s: {last}") from error
                finally:
                    loads.cancel()

    async def router_metrics(self) -> dict[str, float]:
        """Sums over labels."""
        totals: dict[str, float] = {}
        for name, value in _METRIC.findall((await self.http.get("/metrics")).text):
            totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    async def router_counts(self, name: str) -> dict[str, float]:
        """One metric by its one label."""
        found = re.findall(rf'^{name}{{\w+="([^"]*)"}} ([0-9.eE+-]+)$', (await self.http.get("/metrics")).text, re.M)
        return {label: float(value) for label, value in found}

    def resident_mb(self, member: str) -> float:
        return float(psutil.Process(self.service(member).pid).memory_info().rss) / 1e6

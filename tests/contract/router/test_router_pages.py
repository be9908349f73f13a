"""Placement follows the router's page index over real streams, and failures of the streams reach no client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np

from quire.v1 import common_pb2, kvstore_pb2_grpc
from quire_common.pages import chain_hashes
from quire_router.pages.page_keys import page_keys
from quire_router.server import RouterService
from tests.fakes.grpc_host import GrpcHost
from tests.fakes.router.fake_pages import FakePages
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import PAGE_SIZE, FakeScheduler

LIMIT_S = 60.0
PAGES = 20
PROMPT = [int(i) for i in np.random.default_rng(0).integers(0, 250, PAGES * PAGE_SIZE + 1)]
HASHES = chain_hashes(PROMPT, PAGE_SIZE)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.01)


def told(router: RouterService) -> int:
    return len(router._placement.directory.reported)


def depths(rig: RouterRig) -> list[int]:
    """How much of the prompt the index knows of, by scheduler."""
    table, view = rig.router.fleet.table, rig.router._placement._view
    model = rig.router.fleet.models()[0]
    found = view._directory.prefixes([page_keys(model.pages.namespace, 0, HASHES)], time.monotonic()).depths
    rows = [rig.router.fleet.replicas[host.address].row.row for host in rig.scheduler_hosts]
    return [int(found[table.holder[row]]) if table.holder[row] >= 0 else 0 for row in rows]


async def settled(rig: RouterRig, *wanted: int) -> None:
    await until(lambda: bool(rig.router.fleet.models()) and depths(rig) == list(wanted))


async def ask(rig: RouterRig, times: int = 1) -> list[int]:
    """Which scheduler each request was sent to."""
    chosen = []
    for _ in range(times):
        before = [len(scheduler.submits) for scheduler in rig.schedulers]
        response = await rig.complete(PROMPT, max_tokens=2)
        assert response.status_code == 200, response.text
        chosen += [i for i, s in enumerate(rig.schedulers) if len(s.submits) > before[i]]
    return chosen


async def ready(rig: RouterRig, count: int) -> None:
    await until(lambda: sum(replica.accepts for replica in rig.router.fleet.replicas.values()) == count)
    await until(lambda: all(scheduler.pages.watching for scheduler in rig.schedulers))


def three(**fields: Any) -> Sequence[FakeScheduler]:
    return [FakeScheduler(**fields) for _ in range(3)]


async def test_requests_go_to_the_engine_that_holds_their_pages() -> None:
    async with router_rig(three(), expected_pages_s=0.1) as rig:
        await ready(rig, 3)
        rig.schedulers[1].pages.store(HASHES)
        await settled(rig, 0, PAGES, 0)
        assert await ask(rig, 3) == [1, 1, 1]
        rig.schedulers[1].pages.remove(HASHES)
        rig.schedulers[2].pages.store(HASHES[:PAGES])
        await settled(rig, 0, 0, PAGES)
        await asyncio.sleep(0.25)  # what was expected of the former is over
        assert await ask(rig, 3) == [2, 2, 2]


async def test_equal_prompts_go_to_the_same_engine() -> None:
    async with router_rig(three()) as rig:
        await ready(rig, 3)
        assert len(set(await ask(rig, 4))) == 1 and told(rig.router) == 0


async def test_index_recovers_from_gaps_broken_streams_and_restarts() -> None:
    async with router_rig(three(), expected_pages_s=0.1) as rig:
        await ready(rig, 3)
        pages = rig.schedulers[0].pages
        pages.store(HASHES[:5])
        await settled(rig, 5, 0, 0)
        pages.store(HASHES[5:8], skip=3)
        await settled(rig, 8, 0, 0)
        assert len(pages.requests) == 2 and not pages.requests[1].HasField("epoch"), "a gap: from a snapshot"
        pages.cut()
        await until(lambda: len(pages.requests) == 3 and pages.watching == 1)
        assert (pages.requests[2].epoch.boot_id, pages.requests[2].after_sequence) == (1, pages.sequence)
        pages.store(HASHES[8:9])
        await settled(rig, 9, 0, 0)
        pages.restart()
        await settled(rig, 0, 0, 0)
        pages.store(HASHES[:2])
        await settled(rig, 2, 0, 0)
        assert await ask(rig, 1) == [0]


async def test_pages_of_a_broken_stream_are_forgotten_after_page_grace_s() -> None:
    async with router_rig(three(), page_grace_s=2.0, expected_pages_s=0.1) as rig:
        await ready(rig, 3)
        pages = rig.schedulers[1].pages
        pages.store(HASHES)
        await settled(rig, 0, PAGES, 0)
        pages.away = True
        pages.cut()
        await until(lambda: pages.watching == 0)
        assert depths(rig) == [0, PAGES, 0], "most breaks are short"
        await settled(rig, 0, 0, 0)
        await until(lambda: told(rig.router) == 0)
        assert len(await ask(rig, 2)) == 2
        pages.away = False
        await settled(rig, 0, PAGES, 0)


async def test_resumed_stream_keeps_its_pages_without_changes() -> None:
    async with router_rig(three(), page_grace_s=2.0, expected_pages_s=0.1) as rig:
        await ready(rig, 3)
        pages = rig.schedulers[1].pages
        pages.store(HASHES)
        await settled(rig, 0, PAGES, 0)
        pages.cut()
        await until(lambda: len(pages.requests) == 2 and pages.watching == 1)
        assert pages.requests[1].HasField("epoch")
        await asyncio.sleep(2.5)
        assert depths(rig) == [0, PAGES, 0] and await ask(rig, 2) == [1, 1]


async def test_pages_of_a_removed_instance_are_forgotten() -> None:
    async with router_rig(three()) as rig:
        await ready(rig, 3)
        rig.schedulers[2].pages.store(HASHES)
        await settled(rig, 0, 0, PAGES)
        endpoints = [
            endpoint
            for endpoint in rig.router._discovery._endpoints["scheduler"]  # type: ignore[attr-defined]  # the static one
            if endpoint.address != rig.scheduler_hosts[2].address
        ]
        rig.router.fleet.update(endpoints)
        rig.router._placement.update("scheduler", endpoints)
        assert rig.router._placement.directory.present <= 2
        await until(lambda: told(rig.router) == 0)
        assert 2 not in await ask(rig, 3)


async def test_schedulers_without_page_streams_still_serve() -> None:
    schedulers = three()
    for scheduler in schedulers:
        scheduler.pages.away = True
    async with router_rig(schedulers) as rig:
        await until(lambda: sum(replica.accepts for replica in rig.router.fleet.replicas.values()) == 3)
        assert len(await ask(rig, 3)) == 3


async def test_policies_without_pages_open_no_page_streams() -> None:
    async with router_rig(three(), placement="least_loaded") as rig:
        assert len(await ask(rig, 3)) == 3
        assert not any(scheduler.pages.requests for scheduler in rig.schedulers)


async def test_pages_of_kvstores_are_watched() -> None:
    pages = FakePages()

    class Store(kvstore_pb2_grpc.KvStoreServicer):
        async def Watch(self, request: common_pb2.WatchPagesRequest, context: Any) -> Any:
            async for frame in pages.watch(request):
                yield frame

    def add(server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(Store(), server)

    async with GrpcHost(add) as host, router_rig(three(), kvstores=(host.address,)) as rig:
        await ready(rig, 3)
        view = rig.router._placement._view
        pages.store(HASHES)
        await until(lambda: told(rig.router) == PAGES and len(view.stores) == 1)
        await ask(rig, 1)
        assert rig.router._placement.placer.expected_tokens == PAGES * PAGE_SIZE
        pages.restart()
        await until(lambda: pages.watching == 1 and len(pages.requests) == 2)
        await until(lambda: told(rig.router) == 0)

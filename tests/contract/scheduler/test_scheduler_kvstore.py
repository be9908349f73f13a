"""Prompts that come back from the kvstore, and leases that are released on every path, over real gRPC."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire_common.sequence import RequestContext
from quire_scheduler.kv.kv_traffic import Lookup
from quire_scheduler.service.kvstore_client import KvstoreClient
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.scheduler.scheduler_stack import Router, kvstore, stack
from tests.fakes.worker.fake_worker import undisturbed


async def test_prompts_are_stored_and_loaded() -> None:
    async with kvstore() as (store, address), stack(kvstore=address, kvstore_timeout_ms=5000, page_size=4) as s:
        await s.share(store.pages)
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(13, 5)})
        await router.done(1)
        await s.until_quiet()
        assert len(store.pages) == 4
        await router.submit({2: a_sequence(13, 5), 3: a_sequence(13, 5, skip_cache_read=True)})
        await router.submit({4: a_sequence(13, 5, cache_salt="mine")})
        await router.done(2, 3, 4)
        cached = {h: router.finished[h].usage.cached_tokens for h in (1, 2, 3, 4)}
        assert cached == {1: 0, 2: 12, 3: 0, 4: 0}
        assert all(router.tokens[h] == undisturbed(a_sequence(13, 5))[0] for h in cached)
        phases = {(t.service, t.phase): t for t in router.finished[2].timings}
        assert phases["kvstore", "lookup"].us > 0 and phases["kvstore", "load"].count == 3
        await s.until_quiet()
        await s.until(lambda: not store.leases)
        assert sorted(store.released) == sorted(store.granted)
        assert store.requests[0].keys.namespace == b"ns"


async def test_hanging_or_absent_kvstore_is_a_miss() -> None:
    async with kvstore() as (store, address), stack(kvstore=address, kvstore_timeout_ms=30, page_size=4) as s:
        store.hang = True
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(13, 5)})
        await router.done(1)
        assert router.tokens[1] == undisturbed(a_sequence(13, 5))[0]
    async with stack(kvstore="127.0.0.1:1", kvstore_timeout_ms=200, page_size=4) as s:
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(13, 5)})
        await router.done(1)
        assert router.tokens[1] == undisturbed(a_sequence(13, 5))[0]


async def test_lookup_timeout_grows_with_the_prefill_it_may_save() -> None:
    """Half of what computing would take, within bounds; a fixed time where one was given."""
    async with kvstore() as (store, address), stack(kvstore=address, page_size=4) as s:
        client, hello = KvstoreClient(s.engine.config), s.core.hello
        for compute_s, patience_s in ((None, 0.05), (1e-6, 0.03), (1.2, 0.6), (1e3, 1.0)):
            waited_s = waits_of(client)
            await client.look_up(Lookup(1, RequestContext("r"), (bytes(32),), compute_s), hello)
            assert waited_s == [patience_s]
        await client.close()
        fixed = KvstoreClient(replace(s.engine.config, kvstore_timeout_ms=5000))
        waited_s = waits_of(fixed)
        await fixed.look_up(Lookup(1, RequestContext("r"), (bytes(32),), 1.2), hello)
        assert waited_s == [5.0] and 0 < store.patience_s[-1] <= 5.1, "gRPC rounds it up"
        await fixed.close()


def waits_of(client: KvstoreClient) -> list[float]:
    """The patience of each call from now on, as it is made."""
    waited_s: list[float] = []
    look_up = client._stub.LookupAndPin

    def noted(request: Any, timeout: float) -> Any:
        waited_s.append(timeout)
        return look_up(request, timeout=timeout)

    client._stub.LookupAndPin = noted
    return waited_s


async def test_leases_are_released_when_the_scheduler_stops_while_it_releases_some() -> None:
    async with kvstore() as (store, address):
        async with stack(kvstore=address, kvstore_timeout_ms=5000, page_size=4) as s:
            await s.share(store.pages)
            router = Router(s)
            await router.open()
            await router.submit({1: a_sequence(13, 5)})
            await router.done(1)
            await s.until_quiet()
            store.release_s = 1.0
            await router.submit({2: a_sequence(13, 5)})
            await router.done(2)
            assert store.leases
        assert not store.leases
        assert store.released == store.granted


async def test_leases_are_released_when_the_worker_dies_mid_load() -> None:
    async with kvstore() as (store, address), stack(kvstore=address, kvstore_timeout_ms=5000, page_size=4) as s:
        await s.share(store.pages)
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(13, 5)})
        await router.done(1)
        await s.until_quiet()
        s.worker.answering.clear()
        await router.submit({2: a_sequence(13, 5)})
        await s.until(lambda: len(store.granted) == 1 and s.core.load().running == 1)
        await s.worker.stop()
        await router.done(2)
        assert router.failed[2].code == "WORKER_LOST"
        await s.until(lambda: not store.leases)
        assert store.released == store.granted

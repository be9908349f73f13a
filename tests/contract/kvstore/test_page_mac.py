"""MACs of pages on their ways between processes: over TCP and gRPC, and through a Redis that others write to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis

from quire_common.kv.page_mac import PageMac
from quire_common.pages import PageHeader, check_page, frame_page
from quire_kvstore.arena import Arena
from quire_kvstore.tiers.redis_backend import redis_key
from tests.contract.kvstore.kv_agent_side import EACH, PAGE_BYTES, agent_side
from tests.contract.kvstore.test_kvstore_service import serving
from tests.fakes.kv_transfer.peer_pulls import EACH as EACH_PEER
from tests.fakes.kv_transfer.peer_pulls import PAGES, TARGETS
from tests.fakes.kv_transfer.peer_rig import EMPTY, PeerSide, content, peer_rig
from tests.redis_server import RedisServer, redis_server
from tests.unit.kvstore.pages import BODY_BYTES, FRAMED_BYTES, chain, config, put
from tests.unit.kvstore.tiers import eventually, forget_memory, found, tier, tiered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire_kvstore.page_store import PageStore

__all__ = ["redis_server"]
OLD, NEW, OTHER = "11" * 32, "22" * 32, "33" * 32
A = chain("a", 8)
NAMES = A.keys()
ROOM = 32 * Arena.footprint(PAGE_BYTES + 128)
FAR = ("tcp", "grpc")
"""What leaves the host, or might."""


def mac_of(keys: str) -> PageMac:
    mac = PageMac.from_config(keys)
    assert mac is not None
    return mac


@pytest.mark.parametrize("choice", EACH)
def test_stored_pages_are_loaded_where_both_have_the_key(choice: str) -> None:
    with (
        serving(config(1, ram_bytes=ROOM, page_mac_key=OLD)) as running,
        agent_side(running.address, choice, mac=mac_of(OLD)) as agent,
    ):
        assert agent.store(A) == 8
        assert agent.load(A, agent.look_up(A)) == 8
        assert agent.connector.transport == choice


@pytest.mark.parametrize("choice", EACH)
@pytest.mark.parametrize("theirs", ["", OTHER])
def test_a_store_takes_no_page_off_a_network_without_the_key(choice: str, theirs: str) -> None:
    """Shared memory relies on the lease."""
    with (
        serving(config(1, ram_bytes=ROOM, page_mac_key=OLD)) as running,
        agent_side(running.address, choice, mac=PageMac.from_config(theirs)) as agent,
    ):
        assert agent.store(A) == (0 if choice in FAR else 8)
        assert running.client.lookup(A, pin=False).pages == (0 if choice in FAR else 8)


@pytest.mark.parametrize("choice", EACH)
@pytest.mark.parametrize("theirs", ["", OTHER])
def test_a_worker_takes_no_page_off_a_network_without_the_key(choice: str, theirs: str) -> None:
    with (
        serving(config(1, ram_bytes=ROOM, page_mac_key=theirs)) as running,
        agent_side(running.address, "shm") as near,
        agent_side(running.address, choice, mac=mac_of(OLD)) as agent,
    ):
        assert near.store(A) == 8
        assert agent.load(A, agent.look_up(A)) == (0 if choice in FAR else 8)


@pytest.mark.parametrize("choice", FAR)
def test_what_came_through_shared_memory_gets_its_mac_on_its_way_to_another_host(choice: str) -> None:
    with (
        serving(config(1, ram_bytes=ROOM, page_mac_key=OLD)) as running,
        agent_side(running.address, "shm", mac=mac_of(OLD)) as near,
        agent_side(running.address, choice, mac=mac_of(OLD)) as far,
    ):
        assert near.store(A) == 8
        assert far.load(A, far.look_up(A)) == 8
        assert near.load(A, near.look_up(A)) == 8, "its checksum is what it was"


@pytest.mark.parametrize("choice", FAR)
def test_keys_are_renewed_one_process_after_the_other(choice: str) -> None:
    """Each process has the new key as its second one before any has it as its first."""
    both, first = f"{OLD},{NEW}", f"{NEW},{OLD}"
    for store_keys, worker_keys in ((both, OLD), (both, both), (first, both), (both, first), (first, NEW)):
        with (
            serving(config(1, ram_bytes=ROOM, page_mac_key=store_keys)) as running,
            agent_side(running.address, choice, mac=mac_of(worker_keys)) as agent,
        ):
            assert agent.store(A) == 8, (store_keys, worker_keys)
            assert agent.load(A, agent.look_up(A)) == 8, (store_keys, worker_keys)


FAR_PEER = EACH_PEER


def pulled(here: PeerSide, there: PeerSide) -> list[bytes]:
    return [there.pool.pages[page] for page in TARGETS]


@pytest.mark.deep
@EACH_PEER
@pytest.mark.parametrize("keys", [(OLD, OLD), (OLD, f"{NEW},{OLD}"), (OLD, OTHER), ("", OLD)])
def test_pages_between_workers_need_the_same_key(transport: str, keys: tuple[str, str]) -> None:
    with peer_rig() as rig:
        here, there = (rig.side(transport=transport, page_mac_key=each) for each in keys)
        here.export(1, *PAGES)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: 1 in there.told)
        counts = transport == "shm" or (keys[0] in keys[1].split(",") and bool(keys[0]))
        assert there.told[1].ok == counts
        assert pulled(here, there) == ([content(page) for page in PAGES] if counts else [EMPTY] * 6)


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[Any]:
    with Redis.from_url(redis_server.url) as client:
        yield client


def unauthenticated(store: PageStore) -> int:
    return tier(store, "redis").figures.unauthenticated


def test_values_planted_in_redis_are_misses_and_removed_and_counted(redis_server: RedisServer, redis: Any) -> None:
    with tiered(redis_url=redis_server.url, page_mac_key=OLD) as store:
        eventually(lambda: tier(store, "redis").available)
        assert put(store, A, mac_of(OLD)) == (8, 0)
        store.flush(30)
        forget_memory(store)
        values = [redis.get(redis_key(key)) for key in NAMES]
        for key, value in zip(NAMES, values, strict=True):
            check_page(value, key, mac=mac_of(OLD))
        assert found(store, A) == (8, "redis") and unauthenticated(store) == 0
        forget_memory(store)
        wrong = b"\xff" * BODY_BYTES
        planted = frame_page(A.key(3), "uint8", wrong) + wrong
        assert len(planted) == FRAMED_BYTES
        redis.set(redis_key(A.key(3)), planted)
        assert found(store, A) == (3, "redis")
        eventually(lambda: unauthenticated(store) == 1)
        eventually(lambda: not redis.exists(redis_key(A.key(3))))
        forget_memory(store)
        genuine = PageHeader.unpack(values[0])
        renamed = bytearray(frame_page(A.key(2), "uint8", values[0][128:]))
        renamed[14:16], renamed[104:120] = genuine.key_number.to_bytes(2, "little"), genuine.mac
        redis.set(redis_key(A.key(2)), bytes(renamed) + values[0][128:])
        assert found(store, A) == (2, "redis")
        eventually(lambda: unauthenticated(store) == 2)
        eventually(lambda: not redis.exists(redis_key(A.key(2)), redis_key(A.key(3))))

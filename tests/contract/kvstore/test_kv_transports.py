"""Each transport between a KV transfer agent and a kvstore: what was stored is loaded, and whatever goes wrong is a
miss."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quire_common.errors import Unavailable
from quire_common.kv.kv_client import StartedPut, TransferCancelled
from quire_common.pages import HEADER_BYTES
from quire_kvstore.arena import Arena
from quire_worker.kv_transfer.transports.registry import Traffic, names
from quire_worker.kv_transfer.transports.shm_transport import ShmTransport
from tests.contract.kvstore.kv_agent_side import EACH, FAST, PAGE_BYTES, AgentSide, agent_side
from tests.contract.kvstore.test_kvstore_service import Running, serving
from tests.tiers import deep_after
from tests.unit.kvstore.pages import chain, config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

A, B = chain("a", 8), chain("b", 8)
ROOM = 8 * Arena.footprint(HEADER_BYTES + PAGE_BYTES)


@pytest.fixture
def running() -> Iterator[Running]:
    with serving(config(1, ram_bytes=4 * ROOM, sweep_s=0.02)) as service:
        yield service


def eventually(condition: Callable[[], bool]) -> None:
    clock = threading.Event()
    for _ in range(3000):
        if condition():
            return
        clock.wait(0.02)
    raise AssertionError("it did not happen")


def arena_maps() -> int:
    return Path("/proc/self/maps").read_text().count("quire-kvstore-arena")


def test_each_transport_of_the_registry_is_tested_here() -> None:
    assert names(Traffic.STORE) == EACH


@pytest.mark.parametrize("choice", [*EACH, "auto"])
@pytest.mark.parametrize("page_bytes", deep_after(1, [PAGE_BYTES, 1000, (2 << 20) + 4096]))
def test_what_is_stored_is_loaded(choice: str, page_bytes: int) -> None:
    with (
        serving(config(1, ram_bytes=48 << 20)) as running,
        agent_side(running.address, choice, page_bytes=page_bytes) as transfer_agent,
    ):
        assert transfer_agent.store(A) == 8
        assert transfer_agent.store(A) == 8, "they are there already"
        for _ in range(2):  # connections and maps are used again
            lease = transfer_agent.look_up(A)
            assert transfer_agent.load(A, lease) == 8
            assert transfer_agent.client.release(lease) == 1
        assert transfer_agent.store(B) == 8
        assert transfer_agent.connector.transport == ("shm" if choice == "auto" else choice)
        running.service.store.check_integrity()


def test_the_choice_is_known_before_the_first_move(running: Running) -> None:
    with agent_side(running.address, "auto") as transfer_agent:
        transfer_agent.transports.probe()
        assert transfer_agent.connector.transport == "shm"
    with serving(config(8, share_memory=False)) as far, agent_side(far.address, "auto") as transfer_agent:
        transfer_agent.transports.probe()
        assert transfer_agent.connector.transport == "tcp"
    with (
        serving(config(8, share_memory=False, data_port=-1)) as plain,
        agent_side(plain.address, "auto") as transfer_agent,
    ):
        transfer_agent.transports.probe()
        assert transfer_agent.connector.transport == "grpc"
    with agent_side("127.0.0.1:1", "auto") as transfer_agent:
        transfer_agent.transports.probe()
        assert transfer_agent.connector.transport == "", "nobody is there yet"


def test_without_the_library_pages_go_over_grpc(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_worker.kv_transfer.transports.transport_selector.AVAILABLE", False)
    with agent_side(running.address, "auto") as transfer_agent:
        assert transfer_agent.store(A) == 8 and transfer_agent.connector.transport == "grpc"
    monkeypatch.setattr("quire_kvstore.data.data_port.AVAILABLE", False)
    with serving(config(1, ram_bytes=4 * ROOM)) as bare:
        monkeypatch.undo()
        with agent_side(bare.address, "auto") as transfer_agent:
            assert transfer_agent.store(A) == 8 and transfer_agent.connector.transport == "grpc"


@pytest.mark.parametrize("choice", EACH)
@pytest.mark.parametrize("place", deep_after(2, [10, HEADER_BYTES + PAGE_BYTES - 1, 40, 125, HEADER_BYTES]))
def test_a_byte_that_went_bad_in_memory_is_a_miss_and_counted_and_gone(
    running: Running, choice: str, place: int
) -> None:
    with agent_side(running.address, choice) as transfer_agent:
        transfer_agent.store(A)
        lease = transfer_agent.look_up(A)
        offsets = running.service.store.page_locations(lease)[1]
        with running.service.store._ram._arena.view(offsets[3], HEADER_BYTES + PAGE_BYTES) as view:
            view[place] ^= 0x10
        assert transfer_agent.load(A, lease) == 3
        assert running.client.lookup(A, pin=False).pages == 3
        assert running.service.store.stats().counts.corrupt == 1
        assert transfer_agent.store(A) == 8, "it is wanted again"
        again = transfer_agent.look_up(A)
        assert transfer_agent.load(A, again) == 8
        assert transfer_agent.connector.transport == choice, "a wrong page is no fault of the way that it came"


def test_a_byte_that_goes_bad_while_its_page_is_sent_is_a_miss_and_counted_and_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over gRPC: pages of several frames are checked before the first of them, so that the reader alone sees it."""
    page_bytes = (2 << 20) + 4096
    with (
        serving(config(1, ram_bytes=48 << 20)) as running,
        agent_side(running.address, "grpc", page_bytes=page_bytes) as transfer_agent,
    ):
        transfer_agent.store(A)
        lease, store = transfer_agent.look_up(A), running.service.store
        offset, look = store.page_locations(lease)[1][3], store.verify_page
        spoilt: list[int] = []

        def look_and_spoil(lease_id: bytes, index: int) -> bool:
            intact = look(lease_id, index)
            if index == 3 and not spoilt:
                spoilt.append(index)
                with store._ram._arena.view(offset, HEADER_BYTES + page_bytes) as view:
                    view[-1] ^= 0x10
            return intact

        monkeypatch.setattr(store, "verify_page", look_and_spoil)
        assert transfer_agent.load(A, lease) == 3 and spoilt
        assert store.stats().counts.corrupt == 1
        assert running.client.lookup(A, pin=False).pages == 3
        assert transfer_agent.store(A) == 8, "it is wanted again"
        assert transfer_agent.load(A, transfer_agent.look_up(A)) == 8
        store.check_integrity()


@pytest.mark.parametrize("choice", EACH)
def test_when_the_lease_ends_under_way_what_comes_is_right_and_the_rest_a_miss(choice: str) -> None:
    """With memory for these pages alone, which others want as soon as the lease is gone."""
    with (
        serving(config(1, ram_bytes=ROOM)) as running,
        agent_side(running.address, choice) as transfer_agent,
        agent_side(running.address, "grpc") as other,
    ):
        transfer_agent.store(A)
        lease = transfer_agent.look_up(A)

        def end(index: int) -> None:
            if index == 2:
                assert other.client.release(lease) == 1
                assert other.store(B) == 8

        came = transfer_agent.load(A, lease, end)
        assert 3 <= came < 8 or choice != "shm"
        assert transfer_agent.load(A, lease) == 0
        assert transfer_agent.load(B, transfer_agent.look_up(B)) == 8


@pytest.mark.parametrize("choice", EACH)
def test_a_lease_that_is_not_there_is_a_miss(running: Running, choice: str) -> None:
    with agent_side(running.address, choice) as transfer_agent:
        transfer_agent.store(A)
        for lease in (b"", b"x" * 16):
            assert transfer_agent.load(A, lease) == 0


@pytest.mark.parametrize("choice", EACH)
def test_an_abandoned_move_leaves_nothing_behind(running: Running, choice: str) -> None:
    def abandon(index: int) -> None:
        if index == 2:
            raise TransferCancelled

    with agent_side(running.address, choice) as transfer_agent:
        with pytest.raises(TransferCancelled):
            transfer_agent.store(A, abandon)
        eventually(lambda: running.service.store.stats().pending_puts == 0)
        assert running.client.lookup(A, pin=False).pages == 0
        assert transfer_agent.store(A) == 8
        lease = transfer_agent.look_up(A)
        with pytest.raises(TransferCancelled):
            transfer_agent.load(A, lease, abandon)
        assert transfer_agent.load(A, lease) == 8


def with_access(transfer_agent: AgentSide, **changes: Any) -> None:
    """What the store tells of its leases comes changed."""
    attach, begin = transfer_agent.client.attach, transfer_agent.client.begin_put
    lying = lambda *a, **k: dataclasses.replace(attach(*a, **k), **changes)  # noqa: E731 - one expression
    transfer_agent.client.attach = lying  # type: ignore[method-assign]  # a liar in between

    def begin_put(*args: Any, **named: Any) -> StartedPut:
        begun = begin(*args, **named)
        return dataclasses.replace(begun, access=dataclasses.replace(begun.access, **changes))

    transfer_agent.client.begin_put = begin_put  # type: ignore[method-assign]  # as above


@pytest.mark.deep
@pytest.mark.parametrize("choice", FAST)
def test_with_a_wrong_key_nothing_goes_this_way(running: Running, choice: str) -> None:
    with agent_side(running.address, "grpc") as honest, agent_side(running.address, choice) as transfer_agent:
        honest.store(A)
        lease = honest.look_up(A)
        with_access(transfer_agent, key=b"w" * 32)
        assert transfer_agent.load(A, lease) == 0
        with pytest.raises(Unavailable):
            transfer_agent.store(B)
        assert running.client.lookup(B, pin=False).pages == 0
        assert running.service.store.stats().pending_puts == 0, "and the put was released"
    with agent_side(running.address, "auto") as transfer_agent:
        with_access(transfer_agent, key=b"w" * 32)
        assert transfer_agent.load(A, lease) == 8, "another way is open"
        assert transfer_agent.connector.transport == "grpc"
        assert transfer_agent.store(B) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": (0,) * 8},
        {"offsets": (63,) * 8},
        {"offsets": (4 * ROOM,) * 8},
        {"offsets": (4 * ROOM - PAGE_BYTES,) * 8},
        {"offsets": ((1 << 64) - 1,) * 8},
        {"offsets": (64 + 4096,) * 8},
        {"generations": (0,) * 8},
        {"offsets": (), "generations": ()},
    ],
)
def test_places_that_are_none_are_misses(running: Running, changes: dict[str, Any]) -> None:
    with agent_side(running.address, "shm") as transfer_agent:
        transfer_agent.store(A)
        lease = transfer_agent.look_up(A)
        with_access(transfer_agent, **changes)
        assert transfer_agent.load(A, lease) == 0


@pytest.mark.parametrize(
    "arena", ["", "docker.sock", "../x", "quire-kvstore-" + "g" * 32, "quire-kvstore-" + "0" * 33, "/run/x"]
)
def test_only_a_kvstores_socket_is_dialled(running: Running, arena: str) -> None:
    with agent_side(running.address, "auto") as transfer_agent:
        assert not ShmTransport().offered(dataclasses.replace(transfer_agent.client.data_endpoints(), arena=arena))
        with_access(transfer_agent, arena=arena)
        assert transfer_agent.store(A) == 8
        assert transfer_agent.connector.transport == "tcp"


@pytest.mark.deep
@pytest.mark.parametrize("choice", FAST)
def test_a_connection_that_breaks_under_way_is_made_up_for_by_the_next_way(running: Running, choice: str) -> None:
    with agent_side(running.address, "auto") as transfer_agent:
        if choice == "tcp":
            with_access(transfer_agent, arena="")
        port = running.service._data

        cuts: list[int] = []

        def cut(index: int) -> None:
            if index == 3 and not cuts:
                cuts.append(index)
                for session in list(port._sessions._threads):
                    session.stop()

        assert transfer_agent.store(A, cut) == 8
        assert transfer_agent.connector.transport != choice, "the next one has carried the rest"
    with agent_side(running.address, "auto") as transfer_agent:
        transfer_agent.store(A)
        lease = transfer_agent.look_up(A)
        if choice == "tcp":
            with_access(transfer_agent, arena="")
        cuts.clear()
        assert transfer_agent.load(A, lease, cut) == 8


@pytest.mark.deep
@pytest.mark.parametrize("choice", FAST)
def test_connections_that_the_store_let_go_are_made_anew(choice: str) -> None:
    with (
        serving(config(1, ram_bytes=4 * ROOM, data_idle_s=0.5)) as running,
        agent_side(running.address, choice) as transfer_agent,
    ):
        port = running.service._data
        for run in (A, B):
            assert transfer_agent.store(run) == 8
            assert transfer_agent.load(run, transfer_agent.look_up(run)) == 8
            eventually(lambda: len(port) == 0)
        eventually(lambda: arena_maps() == 1)  # the store's own


def test_the_map_goes_with_the_store_and_nothing_stays_open() -> None:
    fds, maps = len(os.listdir("/proc/self/fd")), arena_maps()  # noqa: PTH208 - a count
    with serving(config(1, ram_bytes=4 * ROOM)) as running, agent_side(running.address, "shm") as transfer_agent:
        transfer_agent.store(A)
        assert transfer_agent.load(A, transfer_agent.look_up(A)) == 8
        assert arena_maps() == maps + 2
        running.service._data.close()
        eventually(lambda: arena_maps() == maps + 1)
        assert transfer_agent.load(A, transfer_agent.look_up(A)) == 0
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds)  # noqa: PTH208 - a count
    assert arena_maps() == maps

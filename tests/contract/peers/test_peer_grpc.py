"""Where a network lets no data connection through, pages go over gRPC: whichever way it does that, and nothing else
changes."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest

from bench.harness.plain_pages import ids
from quire_common.config import join_address
from quire_common.credit import MoveKind, PageMove, RankAddress
from quire_common.errors import ConfigError
from quire_common.serving.listen_errors import find_listen_error
from quire_worker.config import WorkerConfig
from quire_worker.kv_transfer.peers.peer_access import PeerAccess
from quire_worker.kv_transfer.peers.peer_hosts import PeerHosts
from quire_worker.kv_transfer.peers.peer_listeners import PeerListeners
from quire_worker.kv_transfer.peers.servicer import serve_peers
from quire_worker.kv_transfer.setup import AgentSetup
from tests.fakes.kv_transfer.peer_pulls import (
    LATE_S,
    NOTICED_S,
    PAGES,
    TARGETS,
    a_relay,
    address_of,
    failed,
    know_of_all,
)
from tests.fakes.kv_transfer.peer_rig import KEY, PeerRig, PeerSide, content, peer_rig
from tests.tcp_relay import TcpRelay

# Pulls.
MANY = 6


def beside(side: PeerSide, port: int) -> tuple[RankAddress, ...]:
    """Another data port than the side's, and its Peer service."""
    return RankAddress(0, "tcp", f"127.0.0.1:{port}".encode()), address_of(side, "grpc")


def came(rig: PeerRig, here: PeerSide, there: PeerSide, number: int = 1) -> float:
    took_s = rig.until(lambda: number in there.told and number in here.told)
    assert there.told[number].ok and here.told[number].ok
    assert [there.pool.pages[page] for page in TARGETS] == [content(page) for page in PAGES]
    return took_s


def test_a_data_port_that_refuses_costs_no_time() -> None:
    """Of several pulls, since one alone is slow on a slow machine."""
    with peer_rig() as rig, contextlib.ExitStack() as held:
        here, there = rig.side(), rig.side()
        know_of_all(rig, here, there)
        took_s = 0.0
        for number in range(1, 1 + MANY):
            nobody = held.enter_context(socket.socket())
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            here.export(number, *PAGES)
            there.pull(number, beside(here, nobody.getsockname()[1]), PAGES, TARGETS)
            took_s += came(rig, here, there, number)
        assert took_s < MANY * NOTICED_S
        rig.assert_nothing_left()


@pytest.mark.parametrize("mode", ["silent", "garbage"])
def test_a_data_port_that_lets_nothing_through_is_waited_for_once(mode: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        know_of_all(rig, here, there)
        with a_relay(here, mode) as relay:
            here.export(1, *PAGES)
            there.pull(1, beside(here, relay.port), PAGES, TARGETS)
            assert came(rig, here, there) < LATE_S
            if mode == "silent":
                took_s = 0.0
                for number in range(2, 2 + MANY):
                    here.export(number, *PAGES)
                    there.pull(number, beside(here, relay.port), PAGES, TARGETS)
                    took_s += came(rig, here, there, number)
                assert took_s < MANY * NOTICED_S
        rig.assert_nothing_left()


def test_a_network_that_begins_to_swallow_data_in_mid_pull_ends_it() -> None:
    """The peer was there: it may as well hang, by every way."""
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        with a_relay(here, "pass") as relay:
            here.export(1, *PAGES, offered=2)
            there.pull(1, beside(here, relay.port), PAGES, TARGETS)
            rig.until(lambda: there.pool.pages[TARGETS[1]] == content(PAGES[1]))
            relay.mode = "silent"
            rig.until(lambda: 1 in there.told)
            failed(there, 2)


def test_a_data_port_that_breaks_under_way_is_followed_by_grpc() -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        relay = a_relay(here, "pass")
        with relay:
            here.export(1, *PAGES, offered=2)
            there.pull(1, beside(here, relay.port), PAGES, TARGETS)
            rig.until(lambda: there.pool.pages[TARGETS[1]] == content(PAGES[1]))
        here.transfer_agent.offer_pages(1, len(PAGES))
        came(rig, here, there)
        rig.assert_nothing_left()


@pytest.mark.deep
def test_nobody_there_at_all_ends_a_pull_without_pages() -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        know_of_all(rig, here, there)
        here.export(1, *PAGES)
        with a_relay(here, "silent") as data, TcpRelay(("127.0.0.1", data.port), "silent") as grpc:
            sources = (
                RankAddress(0, "tcp", f"127.0.0.1:{data.port}".encode()),
                RankAddress(0, "grpc", f"127.0.0.1:{grpc.port}".encode()),
            )
            there.pull(1, sources, PAGES, TARGETS)
            assert rig.until(lambda: 1 in there.told) < LATE_S
            failed(there, 0)


@pytest.mark.parametrize(
    "told", ["unix:/tmp/x:1", "dns:///host:1", "ipv4:127.0.0.1:1", "unix-abstract:x:1", "nowhere", "a b:1", ":1"]
)
def test_an_address_that_means_more_to_grpc_than_a_host_is_none(told: str) -> None:
    source = (RankAddress(0, "grpc", told.encode()),)
    move = PageMove(1, MoveKind.PULL, 0, ids(), (), lease_key=KEY, source=source)
    access = PeerAccess.from_move(move, PeerHosts(["0.0.0.0/0", "*.host"]))
    assert access.grpc is None


def test_port_for_grpc_that_cannot_be_opened_is_logged_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    """One is of no host, and one is another process's. The engine's own socket on a port does not take it."""
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        assert "another process had" in str(find_listen_error(join_address(*reserved.getsockname()), shared=True))
        for address, cause in (("192.0.2.1:1", "assign"), (join_address(*taken.getsockname()), "in use")):
            caplog.clear()
            no_port: Any = None
            serve_peers(AgentSetup("", "", "", 4096, 2, peers=True, peer_grpc=address), no_port)
            (logged,) = [each for each in caplog.records if "no pages go over gRPC" in each.getMessage()]
            assert cause in str(vars(logged))


def test_the_port_for_grpc_is_kept_and_told_and_nobody_elses() -> None:
    config = WorkerConfig(listen="127.0.0.1:7", advertise="engine.local:7", peer_transport="grpc")
    door = PeerListeners(config)
    (address,) = door.addresses
    port = door.grpc_listen.rpartition(":")[2]
    assert (address.transport, address.descriptor.decode()) == ("grpc", f"engine.local:{port}")
    assert door.grpc_listen == f"127.0.0.1:{port}" and door.inherited_fds == {}
    with pytest.raises(ConfigError, match="--peer-grpc-listen") as error:
        PeerListeners(WorkerConfig(peer_grpc_listen=f"127.0.0.1:{port}", peer_transport="grpc"))
    assert error.value.code == "PORT_IN_USE"
    door.close()
    assert PeerListeners(WorkerConfig(peer_grpc_listen="off", peer_transport="grpc")).addresses == ()

"""What tests of two workers that exchange pages share: one pulls six pages from the other."""

from __future__ import annotations

import pytest

from quire_common.config import ServiceConfig
from quire_common.credit import RankAddress
from quire_common.kv_data.connection import DataConnection
from quire_worker.kv_transfer.peers.tunnel_stream import TunnelDialer
from quire_worker.kv_transfer.transports.data_link import connect
from quire_worker.kv_transfer.transports.registry import missing_package
from tests.fakes.kv_transfer.peer_rig import EMPTY, PeerRig, PeerSide, content
from tests.tcp_relay import TcpRelay
from tests.tiers import deep_after

NO_NIXL = bool(missing_package("nixl"))
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(NO_NIXL, reason="the package nixl is not installed: make test-nixl")
)
EACH = pytest.mark.parametrize("transport", [*deep_after(1, ["tcp", "shm", "grpc"]), NIXL])
"""Pulls by every transport: `make test` has one that crosses hosts, and the deep tests have the others."""
# Whoever comes in by NIXL says so on a data connection.
_COMES_BY = {"nixl": "tcp"}
PAGES = [1, 2, 3, 4, 5, 6]
TARGETS = [31, 32, 33, 34, 35, 36]
# A stopped peer is noticed after two seconds of silence, of which some may have passed before it was stopped; one that
# is away, or says so, at once. Nobody who does not notice stops waiting at all: a loaded machine may be late.
NOTICED_S, LEAST_S = 2.0, 0.5
LATE_S = 30.0


def pulling(rig: PeerRig, transport: str = "auto", came: int = 2) -> tuple[PeerSide, PeerSide]:
    """One pulls from the other, and waits for what is not filled yet."""
    here, there = rig.side(transport=transport), rig.side(transport=transport)
    here.export(1, *PAGES, offered=came)
    there.pull(1, here.sources, PAGES, TARGETS)
    arrived = TARGETS[came - 1] if came else 0
    rig.until(lambda: there.pool.pages[arrived] != EMPTY)
    return here, there


def failed(side: PeerSide, pages: int) -> None:
    """The side's first move has failed with so many pages, and there is nothing of the others."""
    assert (side.told[1].ok, side.came(1)) == (False, pages)
    for place, target in enumerate(TARGETS):
        assert side.pool.pages[target] == (content(PAGES[place]) if place < pages else EMPTY)


def know_of_all(rig: PeerRig, here: PeerSide, there: PeerSide) -> None:
    """Both processes are there, and the one knows of all that was exported before this."""
    here.export(900, 7, key=b"e" * 32)
    there.pull(900, here.sources, [7], [57], key=b"e" * 32)
    rig.until(lambda: 900 in here.told and 900 in there.told)


def address_of(side: PeerSide, transport: str) -> RankAddress:
    transport = _COMES_BY.get(transport, transport)
    return next(address for address in side.sources if address.transport == transport)


def through(relay: TcpRelay, transport: str = "tcp") -> tuple[RankAddress, ...]:
    return (RankAddress(0, transport, f"127.0.0.1:{relay.port}".encode()),)


def a_relay(side: PeerSide, mode: str, transport: str = "tcp") -> TcpRelay:
    return TcpRelay(("127.0.0.1", port_of(side, transport)), mode)


def port_of(side: PeerSide, transport: str) -> int:
    return int(address_of(side, transport).descriptor.rpartition(b":")[2])


def dial(side: PeerSide, transport: str) -> DataConnection:
    """Another peer of that side, greeted."""
    transport = _COMES_BY.get(transport, transport)
    if transport == "grpc":
        return TunnelDialer(ServiceConfig())(("127.0.0.1", port_of(side, transport)), 30)
    if transport == "tcp":
        return connect(("127.0.0.1", port_of(side, transport)), 30)
    return connect(address_of(side, transport).descriptor.decode().partition("/")[2], 30)

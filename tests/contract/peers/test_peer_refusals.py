"""Who may have pages of another worker: frames, keys, leases and connections that are not as they should be."""

from __future__ import annotations

import socket
import sys

import pytest

from quire_common.columns import pack_i32
from quire_common.credit import RankAddress
from quire_common.kv_data.connection import DataConnection
from quire_common.kv_data.frame import FrameKind, Head
from quire_common.kv_data.lease_key import NO_KEY, handle_of
from quire_worker.kv_transfer.peers.pull import EXPORT_WAIT_S
from tests.fakes.kv_transfer.peer_pulls import (
    EACH,
    LATE_S,
    PAGES,
    TARGETS,
    a_relay,
    address_of,
    dial,
    failed,
    know_of_all,
    port_of,
    through,
)
from tests.fakes.kv_transfer.peer_rig import KEY, PeerSide, peer_rig
from tests.tiers import deep_after

# A KV transfer agent that waits longer than others do: a busy machine's "a little later" is none of theirs.
_PATIENT = """
import sys
from quire_worker.kv_transfer.__main__ import make_handlers
from quire_worker.kv_transfer.agent_main import run_agent
from quire_worker.kv_transfer.peers import pull
pull.EXPORT_WAIT_S = 60.0
run_agent(sys.argv[1:], make_handlers)
"""
IN_NO_HURRY = (sys.executable, "-c", _PATIENT)
OVER_A_NETWORK = pytest.mark.parametrize("transport", deep_after(1, ["tcp", "grpc"]))


@OVER_A_NETWORK
@pytest.mark.parametrize("mode", ["flip", "garbage"])
def test_frames_that_were_changed_on_the_way_are_no_pages(mode: str, transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        know_of_all(rig, here, there)
        with a_relay(here, mode, transport) as relay:
            here.export(1, *PAGES)
            there.pull(1, through(relay, transport), PAGES, TARGETS)
            rig.until(lambda: 1 in there.told)
            failed(there, 0)
            relay.mode = "pass"
            there.pull(2, through(relay, transport), PAGES, TARGETS)
            rig.until(lambda: 2 in there.told and 1 in here.told)
            assert there.told[2].ok and here.told[1].ok
        rig.assert_nothing_left()


@EACH
def test_a_key_that_is_not_the_leases_opens_nothing(transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport=transport), rig.side(transport=transport)
        here.export(1, *PAGES)
        there.pull(1, here.sources, PAGES, TARGETS, key=b"x" * 32)
        there.pull(2, here.sources, PAGES, TARGETS, key=NO_KEY)
        rig.until(lambda: len(there.told) == 2)
        failed(there, 0)
        assert here.told == {}
        there.pull(3, here.sources, PAGES, TARGETS)
        rig.until(lambda: 3 in there.told and 1 in here.told)
        assert there.told[3].ok and here.told[1].ok
        rig.assert_nothing_left()


@OVER_A_NETWORK
def test_a_frame_with_the_leases_name_and_without_its_key_ends_the_connection(transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        here.export(1, *PAGES)
        know_of_all(rig, here, there)
        for kind in (FrameKind.GET, FrameKind.DONE, FrameKind.PAGE):
            connection = dial(here, transport)
            connection.send(Head(kind, handle_of(KEY)), connection.client_seals(b"x" * 32))
            assert connection.receive() is None
            connection.close()
        assert 1 not in here.told


@OVER_A_NETWORK
def test_pages_that_the_export_has_not_are_refused(transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        here.export(1, *PAGES)
        know_of_all(rig, here, there)
        for asked in ([6], [-1], [0, 0], [1, 0], [2**31 - 1]):
            connection = dial(here, transport)
            seals, payload = connection.client_seals(KEY), pack_i32(asked)
            connection.send(Head(FrameKind.GET, handle_of(KEY), length=len(payload)), seals, payload)
            frame = connection.receive()
            assert frame is not None and connection.verify_head(frame, seals).kind is FrameKind.REFUSED
            connection.close()


@EACH
def test_a_lease_that_comes_to_be_known_a_little_later_is_waited_for(transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport=transport), rig.side(transport=transport, command=IN_NO_HURRY)
        know_of_all(rig, here, there)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.go_on_for(0.3)
        here.export(1, *PAGES)
        rig.until(lambda: 1 in there.told)
        assert there.told[1].ok


@pytest.mark.deep
@EACH
def test_a_lease_that_has_ended_is_refused_at_once(transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport=transport), rig.side(transport=transport)
        here.export(1, *PAGES)
        there.pull(2, here.sources, PAGES, TARGETS)
        rig.until(lambda: 2 in there.told and 1 in here.told)
        took_s = 0.0
        for number in (1, *range(3, 12)):  # one alone is slow on a slow machine
            there.pull(number, here.sources, PAGES, TARGETS)
            took_s += rig.until(lambda number=number: number in there.told)  # type: ignore[misc]  # a lambda's default
            failed(there, 0)
        assert took_s < 10 * EXPORT_WAIT_S


@pytest.mark.deep
@EACH
def test_pullers_that_stand_still_hold_up_no_others(transport: str) -> None:
    """Each has more to read than sockets hold, and exports have eight slots in all."""
    with peer_rig() as rig:
        here, there = rig.side(transport=transport), rig.side(transport=transport)
        pages, keys = list(range(1, 61)), [bytes([number + 1]) * 32 for number in range(6)]
        for number, key in enumerate(keys):
            here.export(number, *pages, key=key)
        know_of_all(rig, here, there)
        stuck = [still(here, transport, key, len(pages)) for key in keys]
        key = b"z" * 32
        here.export(100, *PAGES, key=key)
        there.pull(100, here.sources, PAGES, TARGETS, key=key)
        assert rig.until(lambda: 100 in there.told) < LATE_S
        assert there.told[100].ok
        rig.until(lambda: here.sockets() == here.idle_sockets)  # they were let go
        for connection in stuck:
            connection.close()
        for number in range(6):
            here.transfer_agent.end_move(number)
        rig.until(lambda: len(here.told) == 8)
        rig.assert_nothing_left()


def still(side: PeerSide, transport: str, key: bytes, pages: int) -> DataConnection:
    """A peer that asks for pages, and then does nothing more."""
    connection = dial(side, transport)
    if transport in ("tcp", "nixl"):
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    payload = pack_i32(range(pages))
    head = Head(FrameKind.GET, handle_of(key), length=len(payload))
    connection.send(head, connection.client_seals(key), payload)
    return connection


@pytest.mark.deep
@EACH
def test_strangers_who_say_nothing_are_let_go(transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport=transport), rig.side(transport=transport)
        here.export(1, *PAGES)
        know_of_all(rig, here, there)
        strangers = []
        for _ in range(300):  # more than it takes
            if transport == "shm":
                sock = socket.socket(socket.AF_UNIX)
                sock.connect("\0" + address_of(here, transport).descriptor.decode().partition("/")[2])
            else:
                sock = socket.create_connection(("127.0.0.1", port_of(here, transport)))
            strangers.append(sock)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: 1 in there.told)
        assert there.told[1].ok
        rig.until(lambda: here.sockets() == here.idle_sockets)
        for sock in strangers:
            sock.close()
        rig.assert_nothing_left()


@pytest.mark.deep
@EACH
def test_a_page_that_is_not_what_it_is_called_ends_the_pull(transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport=transport), rig.side(transport=transport)
        here.export(1, *PAGES)
        there.pull(1, here.sources, [1, 2, 13, 4, 5, 6], TARGETS)  # whoever asks knows better what the third is
        rig.until(lambda: 1 in there.told)
        failed(there, 2)
        here.transfer_agent.end_move(1)
        rig.until(lambda: 1 in here.told)
        rig.assert_nothing_left()


@pytest.mark.deep
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_forged_ticket_makes_no_worker_dial_elsewhere(transport: str) -> None:
    """Whoever has forged it named the lease and its key as they are."""
    with peer_rig() as rig, socket.create_server(("127.0.0.1", 0)) as elsewhere:
        here = rig.side(transport=transport)
        known = f"127.0.0.1:{port_of(here, transport)}"
        there = rig.side(transport=transport, peer_hosts=(known,))
        here.export(1, *PAGES)
        forged = f"127.0.0.1:{elsewhere.getsockname()[1]}".encode()
        there.pull(1, (RankAddress(0, transport, forged),), PAGES, TARGETS)
        rig.until(lambda: 1 in there.told)
        failed(there, 0)
        elsewhere.settimeout(0)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
        there.pull(2, (address_of(here, transport),), PAGES, TARGETS)
        rig.until(lambda: 2 in there.told and 1 in here.told)
        assert there.told[2].ok and here.told[1].ok
        rig.assert_nothing_left()

"""What goes wrong between two workers that exchange pages ends as moves that failed, each told of once, with the pages
that came; nothing of it stays, and no page is ever a wrong one."""

from __future__ import annotations

import os
import select
import signal
import socket
import time

import pytest

from quire_common.columns import pack_i32
from quire_common.credit import RankAddress
from quire_common.kv_data.connection import DataConnection
from quire_common.kv_data.frame import Head, Kind
from quire_common.kv_data.lease_key import NO_KEY, handle_of
from tests.fakes.peer_rig import EMPTY, KEY, PeerRig, PeerSide, content, peer_rig
from tests.tcp_relay import TcpRelay

EACH = pytest.mark.parametrize("transport", ["shm", "tcp"])
PAGES = [1, 2, 3, 4, 5, 6]
TARGETS = [31, 32, 33, 34, 35, 36]
# A stopped peer is noticed after two seconds; a loaded machine is late with everything.
NOTICED_S = 2.0
LATE_S = 8.0


def pulling(rig: PeerRig, transport: str = "auto", came: int = 2) -> tuple[PeerSide, PeerSide]:
    """One pulls from the other, and waits for what is not filled yet."""
    here, there = rig.side(transport=transport), rig.side(transport=transport)
    here.export(1, *PAGES, offered=came)
    there.pull(1, here.sources, PAGES, TARGETS)
    arrived = TARGETS[came - 1] if came else 0
    rig.until(lambda: there.pool.pages[arrived] != EMPTY)
    return here, there


def know_of_all(rig: PeerRig, here: PeerSide, there: PeerSide) -> None:
    """Both processes are there, and the one knows of all that was exported before this."""
    here.export(900, 7, key=b"e" * 32)
    there.pull(900, here.sources, [7], [57], key=b"e" * 32)
    rig.until(lambda: 900 in here.told and 900 in there.told)


def failed(side: PeerSide, pages: int) -> None:
    """The side's first move has failed with so many pages, and there is nothing of the others."""
    assert (side.told[1].ok, side.came(1)) == (False, pages)
    for place, target in enumerate(TARGETS):
        assert side.pool.pages[target] == (content(PAGES[place]) if place < pages else EMPTY)


def address_of(side: PeerSide, transport: str) -> RankAddress:
    return next(address for address in side.sources if address.transport == transport)


def relayed(side: PeerSide, relay: TcpRelay) -> tuple[RankAddress, ...]:
    return (RankAddress(0, "tcp", f"127.0.0.1:{relay.port}".encode()),)


def a_relay(side: PeerSide, mode: str) -> TcpRelay:
    port = int(address_of(side, "tcp").descriptor.rpartition(b":")[2])
    return TcpRelay(("127.0.0.1", port), mode)


@pytest.mark.parametrize("mode", ["flip", "garbage"])
def test_frames_that_were_changed_on_the_way_are_no_pages(mode: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        with a_relay(here, mode) as relay:
            here.export(1, *PAGES)
            there.pull(1, relayed(here, relay), PAGES, TARGETS)
            rig.until(lambda: 1 in there.told)
            failed(there, 0)
            relay.mode = "pass"
            there.pull(2, relayed(here, relay), PAGES, TARGETS)
            rig.until(lambda: 2 in there.told and 1 in here.told)
            assert there.told[2].ok and here.told[1].ok
        rig.assert_nothing_left()


def test_a_connection_that_breaks_under_way_is_made_again() -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        with a_relay(here, "pass") as relay:
            here.export(1, *PAGES, offered=0)
            there.pull(1, relayed(here, relay), PAGES, TARGETS)
            for filled in range(1, 6):
                here.mover.offer(1, filled)
                rig.until(lambda filled=filled: there.pool.pages[TARGETS[filled - 1]] != EMPTY)  # type: ignore[misc]  # a lambda's default
                relay.hang_up()
            here.mover.offer(1, 6)
            rig.until(lambda: 1 in there.told and 1 in here.told)
            assert there.told[1].ok and here.told[1].ok
        rig.assert_nothing_left()


def test_a_network_that_swallows_everything_ends_a_pull() -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        with a_relay(here, "pass") as relay:
            here.export(1, *PAGES, offered=2)
            there.pull(1, relayed(here, relay), PAGES, TARGETS)
            rig.until(lambda: there.pool.pages[TARGETS[1]] != EMPTY)
            relay.mode = "silent"
            assert NOTICED_S - 0.6 <= rig.until(lambda: 1 in there.told) < LATE_S
            failed(there, 2)
        here.mover.end_early(1)
        rig.until(lambda: 1 in here.told)
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


def test_a_frame_with_the_leases_name_and_without_its_key_ends_the_connection() -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        here.export(1, *PAGES)
        know_of_all(rig, here, there)
        host, port = address_of(here, "tcp").descriptor.decode().split(":")
        for kind in (Kind.GET, Kind.DONE, Kind.PAGE):
            connection = DataConnection(socket.create_connection((host, int(port))), 30)
            connection.enter()
            connection.send(Head(kind, handle_of(KEY)), connection.client_seals(b"x" * 32))
            assert connection.receive() is None
            connection.close()
        assert 1 not in here.told


def test_pages_that_the_export_has_not_are_refused() -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        here.export(1, *PAGES)
        know_of_all(rig, here, there)
        host, port = address_of(here, "tcp").descriptor.decode().split(":")
        for asked in ([6], [-1], [0, 0], [2**31 - 1]):
            connection = DataConnection(socket.create_connection((host, int(port))), 30)
            connection.enter()
            seals, payload = connection.client_seals(KEY), pack_i32(asked)
            connection.send(Head(Kind.GET, handle_of(KEY), length=len(payload)), seals, payload)
            arrived = connection.receive()
            assert arrived is not None and connection.admit(arrived, seals).kind is Kind.REFUSED
            connection.close()


@EACH
def test_a_lease_that_comes_to_be_known_a_little_later_is_waited_for(transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport=transport), rig.side(transport=transport)
        know_of_all(rig, here, there)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.go_on_for(0.3)
        here.export(1, *PAGES)
        rig.until(lambda: 1 in there.told)
        assert there.told[1].ok


@EACH
def test_a_lease_that_has_ended_is_refused_at_once(transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport=transport), rig.side(transport=transport)
        here.export(1, *PAGES)
        there.pull(2, here.sources, PAGES, TARGETS)
        rig.until(lambda: 2 in there.told and 1 in here.told)
        there.pull(1, here.sources, PAGES, TARGETS)
        assert rig.until(lambda: 1 in there.told) < 1.0
        failed(there, 0)


def test_an_exporter_that_is_dead_before_it_was_asked_is_noticed_at_once() -> None:
    with peer_rig() as rig:
        here, there = rig.side(), rig.side()
        here.export(1, *PAGES)
        know_of_all(rig, here, there)
        sources = here.sources
        here.close()
        rig.sides.remove(here)
        there.pull(2, sources, PAGES, TARGETS)
        assert rig.until(lambda: 2 in there.told) < NOTICED_S
        assert (there.told[2].ok, there.came(2)) == (False, 0)


@EACH
def test_an_exporter_that_is_killed_under_way_leaves_what_has_come(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        pid = here.pid
        here.signal(signal.SIGKILL)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        failed(there, 2)
        assert (here.told[1].ok, here.came(1)) == (False, 0)
        rig.until(lambda: here.mover.pid not in (None, pid))
        rig.assert_nothing_left()


@EACH
def test_an_exporter_that_is_killed_afterwards_changes_nothing(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        here.mover.offer(1, 6)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        pid = here.pid
        here.signal(signal.SIGKILL)
        rig.until(lambda: here.mover.pid not in (None, pid))
        assert there.told[1].ok and here.told[1].ok
        rig.assert_nothing_left()


@EACH
def test_an_exporter_that_is_stopped_is_noticed_and_may_go_on_afterwards(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        here.signal(signal.SIGSTOP)
        here.mover.offer(1, 6)
        assert NOTICED_S - 0.6 <= rig.until(lambda: 1 in there.told) < LATE_S
        failed(there, 2)
        here.signal(signal.SIGCONT)
        there.pull(2, here.sources, PAGES[2:], TARGETS[2:], first=2)
        rig.until(lambda: 2 in there.told and 1 in here.told)
        assert there.told[2].ok and here.told[1].ok
        assert [there.pool.pages[page] for page in TARGETS] == [content(page) for page in PAGES]
        rig.assert_nothing_left()


@EACH
def test_a_mover_whose_engine_is_silent_gives_no_signs_of_life(transport: str) -> None:
    """The engine's process was stopped, and its mover was not."""
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        here.mover._link.send = lambda incarnation, frame: True  # type: ignore[method-assign]  # a worker that is stopped
        assert rig.until(lambda: 1 in there.told) < LATE_S
        failed(there, 2)


@EACH
def test_a_puller_that_is_killed_holds_nothing_and_comes_again(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        pid = there.pid
        there.signal(signal.SIGKILL)
        rig.until(lambda: 1 in there.told)
        failed(there, 2)
        rig.until(lambda: there.mover.pid not in (None, pid))
        here.mover.offer(1, 6)
        rig.until(lambda: here.sockets() == here.idle_sockets)
        assert here.told == {}
        there.pull(2, here.sources, PAGES, TARGETS)
        rig.until(lambda: 2 in there.told and 1 in here.told)
        assert there.told[2].ok and here.told[1].ok
        rig.assert_nothing_left()


@EACH
def test_a_puller_that_is_stopped_goes_on_where_it_was(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        there.signal(signal.SIGSTOP)
        here.mover.offer(1, 6)
        rig.go_on_for(NOTICED_S + 1)
        assert here.told == there.told == {}
        there.signal(signal.SIGCONT)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        assert there.told[1].ok and here.told[1].ok
        assert [there.pool.pages[page] for page in TARGETS] == [content(page) for page in PAGES]
        rig.assert_nothing_left()


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
        for sock in stuck:
            sock.close()
        for number in range(6):
            here.mover.end_early(number)
        rig.until(lambda: len(here.told) == 8)
        rig.assert_nothing_left()


def still(side: PeerSide, transport: str, key: bytes, pages: int) -> socket.socket:
    """A peer that asks for pages, and then does nothing more."""
    told = address_of(side, transport).descriptor.decode()
    if transport == "tcp":
        host, _, port = told.rpartition(":")
        sock = socket.create_connection((host, int(port)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + told.partition("/")[2])
    connection = DataConnection(sock, 30)
    connection.enter()
    payload = pack_i32(range(pages))
    head = Head(Kind.GET, handle_of(key), length=len(payload))
    connection.send(head, connection.client_seals(key), payload)
    return sock


@EACH
def test_strangers_who_say_nothing_are_let_go(transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport=transport), rig.side(transport=transport)
        here.export(1, *PAGES)
        told = address_of(here, "tcp").descriptor.decode() if transport == "tcp" else ""
        name = "" if transport == "tcp" else address_of(here, "shm").descriptor.decode().partition("/")[2]
        strangers = []
        for _ in range(300):  # more than it takes
            sock = socket.socket(socket.AF_INET if transport == "tcp" else socket.AF_UNIX)
            sock.connect(("127.0.0.1", int(told.rpartition(":")[2])) if transport == "tcp" else "\0" + name)
            strangers.append(sock)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: 1 in there.told)
        assert there.told[1].ok
        rig.until(lambda: here.sockets() == here.idle_sockets)
        for sock in strangers:
            sock.close()
        rig.assert_nothing_left()


@EACH
def test_a_pull_that_is_cancelled_ends_at_once_with_what_has_come(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        there.mover.end_early(1)
        assert rig.until(lambda: 1 in there.told) < 1.0
        rig.until(lambda: here.sockets() == here.idle_sockets)
        here.mover.offer(1, 6)
        rig.go_on_for(0.2)
        failed(there, 2)
        there.pull(2, here.sources, PAGES, TARGETS)
        rig.until(lambda: 2 in there.told and 1 in here.told)
        assert there.told[2].ok and here.told[1].ok
        rig.assert_nothing_left()


@EACH
def test_an_export_that_is_cancelled_ends_its_pull_at_once(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        here.mover.end_early(1)
        here.mover.end_early(1)
        assert rig.until(lambda: 1 in here.told and 1 in there.told) < 1.0
        failed(there, 2)
        assert (here.told[1].ok, here.came(1)) == (False, 0)
        rig.assert_nothing_left()


@EACH
def test_a_new_run_of_the_exporter_refuses_those_of_the_last(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        here.mover.cancel()
        for page in PAGES:
            here.pool.pages[page] = content(99)
        assert rig.until(lambda: 1 in there.told) < 1.0
        failed(there, 2)
        there.pull(2, here.sources, PAGES, TARGETS)
        assert rig.until(lambda: 2 in there.told) < 1.0
        assert there.came(2) == 0 and here.told == {}
        for page in PAGES:
            here.pool.pages[page] = content(page)
        rig.assert_nothing_left()


@EACH
def test_a_new_run_of_the_puller_lets_its_pulls_go(transport: str) -> None:
    with peer_rig() as rig:
        here, there = pulling(rig, transport)
        there.mover.cancel()
        rig.until(lambda: here.sockets() == here.idle_sockets)
        here.mover.offer(1, 6)
        rig.go_on_for(0.2)
        assert there.told == here.told == {} and there.pool.pages[TARGETS[2]] == EMPTY
        here.mover.end_early(1)
        rig.until(lambda: 1 in here.told)
        rig.assert_nothing_left()


@EACH
def test_a_page_that_is_not_what_it_is_called_ends_the_pull(transport: str) -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport=transport), rig.side(transport=transport)
        here.export(1, *PAGES)
        there.pull(1, here.sources, [1, 2, 13, 4, 5, 6], TARGETS)  # whoever asks knows better what the third is
        rig.until(lambda: 1 in there.told)
        failed(there, 2)
        here.mover.end_early(1)
        rig.until(lambda: 1 in here.told)
        rig.assert_nothing_left()


def test_pulls_end_when_their_worker_does() -> None:
    with peer_rig() as rig:
        here, there = pulling(rig)
        began, pidfd = time.monotonic(), os.pidfd_open(there.pid)
        there.close()
        rig.sides.remove(there)
        assert select.select([pidfd], [], [], 30)[0] and time.monotonic() - began < LATE_S
        os.close(pidfd)
        rig.until(lambda: here.sockets() == here.idle_sockets)
        assert here.told == {}

"""Pulls of one host that go on with the connection of the one before: it proves nothing of the next lease, and where it
has gone another is made."""

from __future__ import annotations

import signal

import pytest

from tests.fakes.kv_transfer.peer_pulls import LATE_S, PAGES, TARGETS, failed
from tests.fakes.kv_transfer.peer_rig import PeerRig, PeerSide, SharedPools, content, peer_rig


def pull(rig: PeerRig, here: PeerSide, there: PeerSide, number: int, key: bytes) -> None:
    here.export(number, *PAGES, key=key)
    there.pull(number, here.sources, PAGES, TARGETS, key=key)
    rig.until(lambda: number in here.told and number in there.told)
    assert here.told[number].ok and there.told[number].ok
    assert [there.pool.pages[page] for page in TARGETS] == [content(page) for page in PAGES]


def test_one_pull_after_another_uses_one_connection() -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport="shm"), rig.side(transport="shm")
        for number in range(5):
            pull(rig, here, there, number, bytes([number + 1]) * 32)
            assert here.sockets() - here.idle_sockets <= 1
            rig.go_on_for(0.4)  # it is left to the next one a moment after the end was told
        rig.until(lambda: here.sockets() == here.idle_sockets)  # and not for ever
        pull(rig, here, there, 9, b"z" * 32)
        rig.assert_nothing_left()


def test_ways_take_turns_on_it() -> None:
    shared = SharedPools()
    with peer_rig() as rig:
        here, there = rig.side(shared=shared), rig.side(shared=shared)
        ring_alone = tuple(address for address in here.sources if address.transport != "cuda_ipc")
        for number in range(6):
            key = bytes([number + 1]) * 32
            here.export(number, *PAGES, key=key)
            there.pull(number, ring_alone if number % 2 else here.sources, PAGES, TARGETS, key=key)
            rig.until(lambda n=number: n in here.told and n in there.told)  # type: ignore[misc]  # a lambda's default
            assert there.told[number].ok
            assert [there.pool.pages[page] for page in TARGETS] == [content(page) for page in PAGES]
        assert len(shared.fetched) == 3
        rig.assert_nothing_left()


def test_a_key_that_is_not_the_next_leases_opens_nothing() -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport="shm"), rig.side(transport="shm")
        pull(rig, here, there, 9, b"a" * 32)
        here.export(1, *PAGES, key=b"b" * 32)
        there.pull(1, here.sources, PAGES, TARGETS, key=b"c" * 32)
        rig.until(lambda: 1 in there.told)
        failed(there, 0)
        assert 1 not in here.told
        there.pull(2, here.sources, PAGES, TARGETS, key=b"b" * 32)
        rig.until(lambda: 2 in there.told and 1 in here.told)
        assert there.told[2].ok and here.told[1].ok
        rig.assert_nothing_left()


@pytest.mark.deep
def test_where_the_peers_process_is_another_by_now_there_is_another_connection() -> None:
    with peer_rig() as rig:
        here, there = rig.side(transport="shm"), rig.side(transport="shm")
        pull(rig, here, there, 1, b"a" * 32)
        before = here.pid
        here.signal(signal.SIGKILL)
        rig.until(lambda: here.transfer_agent.pid not in (None, before))
        assert rig.until(lambda: here.sockets() >= here.idle_sockets) < LATE_S
        pull(rig, here, there, 2, b"b" * 32)
        rig.assert_nothing_left()

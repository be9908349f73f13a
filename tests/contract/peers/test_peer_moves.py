"""Two workers' KV transfer agents: pages go from one to the other as they are filled, by each transport, and every move
is told of once."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from quire_common.credit import RankAddress
from quire_worker.kv_transfer.transports.registry import Traffic, names
from tests.fakes.kv_transfer.peer_pulls import EACH, PAGES, TARGETS
from tests.fakes.kv_transfer.peer_rig import EMPTY, PeerRig, PeerSide, content, peer_rig
from tests.tcp_relay import TcpRelay


def test_each_transport_of_the_registry_is_tested_here() -> None:
    tested = {str(each.values[0]) if isinstance(each, ParameterSet) else each for each in EACH.args[1]}
    assert tested == set(names(Traffic.PEER)) - {"cuda_ipc"}, "test_peer_memory_moves.py has that one"


def both(rig: PeerRig, transport: str = "auto", slots: int = 16) -> tuple[PeerSide, PeerSide]:
    return rig.side(transport=transport, slots=slots), rig.side(transport=transport, slots=slots)


def bodies(side: PeerSide, *pages: int) -> list[bytes]:
    return [side.pool.pages[page] for page in pages]


@EACH
def test_pages_come_in_the_order_in_which_they_are_filled(transport: str) -> None:
    with peer_rig() as rig:
        here, there = both(rig, transport)
        here.export(1, *PAGES, offered=0)
        there.pull(1, here.sources, PAGES, TARGETS)
        for filled in range(1, len(PAGES)):
            here.transfer_agent.offer_pages(1, filled)
            rig.until(lambda filled=filled: there.pool.pages[TARGETS[filled - 1]] == content(filled))  # type: ignore[misc]  # a lambda's default
            assert bodies(there, *TARGETS[filled:]) == [EMPTY] * (len(PAGES) - filled)
        rig.go_on_for(1.2)  # signs of life are all that passes meanwhile
        assert here.told == there.told == {}
        here.transfer_agent.offer_pages(1, len(PAGES))
        rig.until(lambda: 1 in there.told and 1 in here.told)
        assert there.told[1].ok and here.told[1].ok and (there.came(1), here.came(1)) == (6, 6)
        assert bodies(there, *TARGETS) == [content(page) for page in PAGES]
        rig.assert_nothing_left()


@EACH
@pytest.mark.parametrize("slots", [2, 4])
def test_more_pages_pass_than_the_rings_hold(transport: str, slots: int) -> None:
    with peer_rig() as rig:
        here, there = both(rig, transport, slots)
        pages, targets = list(range(1, 31)), list(range(31, 61))
        here.export(1, *pages)
        there.pull(1, here.sources, pages, targets)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        assert there.told[1].ok and bodies(there, *targets) == [content(page) for page in pages]


@EACH
def test_many_at_once_and_both_ways(transport: str) -> None:
    with peer_rig() as rig:
        here, there = both(rig, transport)
        for number in range(10):
            key, pages = bytes([number + 1]) * 32, [2 * number + 1, 2 * number + 2]
            here.export(number, *pages, key=key, offered=0)
            there.pull(number, here.sources, pages, [page + 30 for page in pages], key=key)
            there.export(100 + number, *pages, key=key)
            here.pull(100 + number, there.sources, pages, [page + 30 for page in pages], key=key)
        for number in range(9, -1, -1):  # whose turn it is does not depend on who came first
            here.transfer_agent.offer_pages(number, 2)
            rig.until(lambda number=number: number in there.told)  # type: ignore[misc]  # a lambda's default
        rig.until(lambda: len(here.told) == len(there.told) == 20)
        assert all(result.ok for side in rig.sides for result in side.told.values())
        for side in rig.sides:
            assert bodies(side, *range(31, 51)) == [content(page) for page in range(1, 21)]
        rig.assert_nothing_left()


@pytest.mark.deep
@EACH
def test_a_part_of_the_pages_will_do(transport: str) -> None:
    with peer_rig() as rig:
        here, there = both(rig, transport)
        here.export(1, *PAGES)
        there.pull(1, here.sources, PAGES[2:5], TARGETS[2:5], first=2)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        assert there.told[1].ok and here.told[1].ok
        assert bodies(there, *TARGETS[2:5]) == [content(page) for page in PAGES[2:5]]


@pytest.mark.deep
def test_on_one_host_pages_are_taken_from_where_they_lie_and_else_come_over_tcp() -> None:
    with peer_rig() as rig:
        here, there = both(rig)
        assert [address.transport for address in here.sources] == ["shm", "tcp", "grpc"]
        (host, tcp, _), name = here.sources, here.sources[0].descriptor.partition(b"/")[2]
        with TcpRelay(("127.0.0.1", int(tcp.descriptor.rpartition(b":")[2]))) as relay:
            passed = RankAddress(0, "tcp", f"127.0.0.1:{relay.port}".encode())
            relay.mode = "garbage"
            here.export(1, *PAGES)
            there.pull(1, (host, passed), PAGES, TARGETS)
            rig.until(lambda: 1 in there.told)
            assert there.told[1].ok and relay.harmed == 0
            for number, elsewhere in enumerate(
                (b"another-host/" + name, b"/" + name, host.descriptor + b"0", host.descriptor[:-32] + b"f" * 32), 2
            ):
                relay.mode = "pass"
                here.export(number, *PAGES)
                there.pull(number, (RankAddress(0, "shm", elsewhere), passed), PAGES, TARGETS)
                rig.until(lambda number=number: number in there.told)  # type: ignore[misc]  # a lambda's default
                assert there.told[number].ok


@pytest.mark.deep
def test_pages_of_other_ranks_and_addresses_that_are_none_lead_nowhere() -> None:
    with peer_rig() as rig:
        here, there = both(rig)
        here.export(1, *PAGES)
        wrong = [(), (RankAddress(0, "tcp", b"nowhere"),), (RankAddress(0, "pigeon", b"x"),)]
        wrong.append(tuple(RankAddress(1, each.transport, each.descriptor) for each in here.sources))
        wrong.append((RankAddress(0, "tcp", b"127.0.0.1:1"),))
        for number, sources in enumerate(wrong):
            there.pull(number, sources, PAGES, TARGETS)
        rig.until(lambda: len(there.told) == len(wrong))
        assert not any(result.ok or result.pages for result in there.told.values()) and here.told == {}
        there.pull(10, here.sources, PAGES, TARGETS)
        rig.until(lambda: there.came(10) == 6)

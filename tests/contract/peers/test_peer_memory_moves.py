"""Two workers whose devices read each other's memory: pages never see a ring, and count only if their lease stood until
after they were read. The devices are stand-ins; the processes and what they say are real."""

from __future__ import annotations

import signal

import pytest

from quire_common.credit import RankAddress
from tests.fakes.kv_transfer.peer_rig import EMPTY, PeerRig, PeerSide, SharedPools, content, peer_rig
from tests.tiers import deep_after

PAGES = [1, 2, 3, 4, 5, 6]
TARGETS = [31, 32, 33, 34, 35, 36]


def both(rig: PeerRig, shared: SharedPools) -> tuple[PeerSide, PeerSide]:
    return rig.side(shared=shared), rig.side(shared=shared)


def bodies(side: PeerSide, *pages: int) -> list[bytes]:
    return [side.pool.pages[page] for page in pages]


def sure(side: PeerSide) -> int:
    """Pages of moves under way that are known to be good."""
    return sum(opened.in_pool for opened in side.transfer_agent._open.values())


def test_what_is_filled_at_once_is_read_at_once() -> None:
    shared = SharedPools()
    with peer_rig() as rig:
        here, there = both(rig, shared)
        assert [address.transport for address in here.sources] == ["cuda_ipc", "shm", "tcp", "grpc"]
        here.export(1, *PAGES, offered=2)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: shared.fetched == [[1, 2]])
        rig.go_on_for(1.2)  # signs of life are all that passes meanwhile
        assert here.told == there.told == {}
        here.transfer_agent.offer_pages(1, 6)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        assert there.told[1].ok and here.told[1].ok and shared.fetched == [[1, 2], [3, 4, 5, 6]]
        assert bodies(there, *TARGETS) == [content(page) for page in PAGES]
        rig.assert_nothing_left()


def test_a_part_of_the_pages_and_many_at_once() -> None:
    shared = SharedPools()
    with peer_rig() as rig:
        here, there = both(rig, shared)
        for number in range(8):
            key, pages = bytes([number + 1]) * 32, [3 * number + 1, 3 * number + 2, 3 * number + 3]
            here.export(number, *pages, key=key, offered=0)
            there.pull(number, here.sources, pages[1:], [page + 30 for page in pages[1:]], key=key, first=1)
        for number in range(7, -1, -1):
            here.transfer_agent.offer_pages(number, 3)
            rig.until(lambda number=number: number in there.told)  # type: ignore[misc]  # a lambda's default
        rig.until(lambda: len(here.told) == len(there.told) == 8)
        assert all(result.ok for side in rig.sides for result in side.told.values())
        assert bodies(there, 32, 33, 35, 36) == [content(page) for page in (2, 3, 5, 6)]


def test_what_was_read_after_the_lease_had_ended_does_not_count() -> None:
    shared = SharedPools()
    with peer_rig() as rig:
        here, there = both(rig, shared)
        here.export(1, *PAGES, offered=2)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: len(shared.fetched) == 1)
        rig.until(lambda: sure(there) == 2)
        shared.held = True
        here.transfer_agent.offer_pages(1, 6)
        rig.until(lambda: len(shared.fetched) == 2)
        here.transfer_agent.end_move(1)
        rig.until(lambda: 1 in here.told)
        assert there.told == {}, "a read is under way"
        shared.held = False
        rig.until(lambda: 1 in there.told)
        assert not there.told[1].ok and there.came(1) == 2


@pytest.mark.parametrize("end", deep_after(1, ["one export", "the run"]))
def test_a_mover_answers_for_no_lease_whose_end_it_has_yet_to_hear_of(end: str) -> None:
    """Question and end reach it together: whichever it reads first, what was read after the end does not count."""
    shared = SharedPools()
    with peer_rig() as rig:
        here, there = both(rig, shared)
        for number in range(8):
            key, shared.held = bytes([number + 1]) * 32, True
            here.export(number, *PAGES, key=key)
            there.pull(number, here.sources, PAGES, TARGETS, key=key)
            rig.until(lambda number=number: len(shared.fetched) == number + 1)  # type: ignore[misc]  # a lambda's default
            here.signal(signal.SIGSTOP)
            if end == "the run":
                here.transfer_agent.cancel_all()
            else:
                here.transfer_agent.end_move(number)
                rig.until(lambda number=number: number in here.told)  # type: ignore[misc]  # a lambda's default
            shared.held = False
            rig.go_on_for(0.1)
            assert number not in there.told, "nobody has answered for the lease"
            here.signal(signal.SIGCONT)
            rig.until(lambda number=number: number in there.told)  # type: ignore[misc]  # a lambda's default
            assert there.came(number) == 0
        before = here.pid
        here.signal(signal.SIGKILL)
        rig.until(lambda: here.transfer_agent.pid not in (before, None))
        rig.assert_nothing_left()  # the next one has heard of all that concerns it


@pytest.mark.parametrize("offered", [2, 6])
def test_a_lease_that_is_exported_anew_answers_for_nothing_that_was_read_before(offered: int) -> None:
    """A request that lost its slot is prefilled again, into other pages, under the lease that it had."""
    shared = SharedPools()
    with peer_rig() as rig:
        here, there = both(rig, shared)
        shared.held = True
        here.export(1, *PAGES, offered=offered)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: len(shared.fetched) == 1)
        here.transfer_agent.end_move(1)
        rig.until(lambda: 1 in here.told)
        for page in PAGES:
            here.pool.write_page(page, content(page + 40))
        here.export(2, *[page + 10 for page in PAGES])
        shared.held = False
        rig.until(lambda: 1 in there.told)
        assert not there.told[1].ok and there.came(1) == 0
        there.pull(2, here.sources, PAGES, TARGETS)
        rig.until(lambda: 2 in there.told and 2 in here.told)
        assert there.told[2].ok


@pytest.mark.deep
def test_a_move_that_is_ended_early_is_told_of_when_nothing_is_written_any_more() -> None:
    shared = SharedPools()
    with peer_rig() as rig:
        here, there = both(rig, shared)
        shared.held = True
        here.export(1, *PAGES)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: len(shared.fetched) == 1)
        there.transfer_agent.end_move(1)
        rig.go_on_for(0.3)
        assert there.told == {}
        shared.held = False
        rig.until(lambda: 1 in there.told)
        assert not there.told[1].ok and there.came(1) == 0
        here.transfer_agent.end_move(1)
        rig.until(lambda: 1 in here.told)
        rig.assert_nothing_left()


@pytest.mark.deep
def test_memory_that_cannot_be_opened_leaves_the_other_ways() -> None:
    shared = SharedPools()
    with peer_rig() as rig:
        here, there = both(rig, shared)
        shared.pools.clear()
        elsewhere = RankAddress(0, "cuda_ipc", b"pool 0 of another host..")
        for number, sources in enumerate((here.sources, (elsewhere, *here.sources[1:]))):
            here.export(number, *PAGES)
            there.pull(number, sources, PAGES, TARGETS)
            rig.until(lambda number=number: number in there.told and number in here.told)  # type: ignore[misc]  # a lambda's default
            assert there.told[number].ok and bodies(there, *TARGETS) == [content(page) for page in PAGES]
        assert shared.fetched == []


@pytest.mark.deep
def test_where_the_way_breaks_off_another_goes_on() -> None:
    """The peer's process dies; its pool is what it was, and who comes again finds no export."""
    shared = SharedPools()
    with peer_rig() as rig:
        here, there = both(rig, shared)
        here.export(1, *PAGES, offered=3)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: len(shared.fetched) == 1)
        rig.until(lambda: sure(there) == 3)
        here.signal(signal.SIGKILL)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        assert not there.told[1].ok and there.came(1) == 3
        assert bodies(there, *TARGETS) == [*(content(page) for page in PAGES[:3]), EMPTY, EMPTY, EMPTY]


@pytest.mark.deep
def test_a_reader_whose_process_dies_keeps_nothing_that_is_not_sure() -> None:
    shared = SharedPools()
    with peer_rig() as rig:
        here, there = both(rig, shared)
        shared.held = True
        here.export(1, *PAGES)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: len(shared.fetched) == 1)
        there.signal(signal.SIGKILL)
        rig.until(lambda: 1 in there.told)
        assert not there.told[1].ok and there.came(1) == 0
        shared.held = False
        here.transfer_agent.end_move(1)
        rig.until(lambda: 1 in here.told)

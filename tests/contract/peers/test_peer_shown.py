"""Pages that one worker shows another several at a time, of a ring with room for that: what goes wrong with one of
them, and who holds their slots."""

from __future__ import annotations

import pytest

from quire_common.columns import pack_i32
from quire_common.kv_data.connection import DataConnection
from quire_common.kv_data.frame import FrameKind, Head, unpack_places
from quire_common.kv_data.lease_key import handle_of
from tests.fakes.kv_transfer.peer_pulls import LATE_S, dial, know_of_all
from tests.fakes.kv_transfer.peer_rig import EMPTY, KEY, PeerRig, PeerSide, content, peer_rig
from tests.tiers import deep_after

SLOTS = 64
NUMBERS = list(range(1, 21))
TARGETS = [number + 30 for number in NUMBERS]


def both(rig: PeerRig) -> tuple[PeerSide, PeerSide]:
    return rig.side(slots=SLOTS, transport="shm"), rig.side(slots=SLOTS, transport="shm")


class Puller:
    """A peer that takes what it is shown when the test says so."""

    def __init__(self, side: PeerSide, indices: range) -> None:
        self.connection: DataConnection = dial(side, "shm")
        self.seals = self.connection.client_seals(KEY)
        payload = pack_i32(indices)
        self.connection.send(Head(FrameKind.GET, handle_of(KEY), length=len(payload)), self.seals, payload)

    def shown(self, rig: PeerRig) -> range:
        """Pages of the next frame, for which the engine goes on."""
        while True:
            rig.until(lambda: self.connection.wait(0))
            frame = self.connection.receive()
            assert frame is not None
            head = self.connection.verify_head(frame, self.seals)
            if head.kind is FrameKind.ALIVE:
                continue
            assert head.kind is FrameKind.SHOWN
            payload = bytearray(head.length)
            self.connection.receive_payload(frame, self.seals, memoryview(payload))
            return range(head.page, head.page + len(unpack_places(payload)))

    def taken(self, page: int) -> None:
        self.connection.send(Head(FrameKind.TAKEN, handle_of(KEY), page), self.seals)

    def ended(self) -> bool:
        """Whether nothing more comes but pages that were under way."""
        while (frame := self.connection.receive()) is not None:
            if self.connection.verify_head(frame, self.seals).kind is not FrameKind.SHOWN:
                return True
            self.connection.receive_payload(frame, self.seals, memoryview(bytearray(frame.head.length)))
        return True


def test_pages_come_several_at_a_time_and_whole() -> None:
    with peer_rig() as rig:
        here, there = both(rig)
        here.export(1, *NUMBERS)
        there.pull(1, here.sources, NUMBERS, TARGETS)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        assert there.told[1].ok and [there.pool.pages[page] for page in TARGETS] == [content(n) for n in NUMBERS]
        rig.assert_nothing_left()


@pytest.mark.parametrize("wrong", deep_after(1, [2, 3, 4, 11]))
def test_one_that_is_not_what_it_is_called_takes_nothing_from_those_before(wrong: int) -> None:
    with peer_rig() as rig:
        here, there = both(rig)
        here.export(1, *NUMBERS)
        numbers = [*NUMBERS[:wrong], 25, *NUMBERS[wrong + 1 :]]
        there.pull(1, here.sources, numbers, TARGETS)
        rig.until(lambda: 1 in there.told)
        assert (there.told[1].ok, there.came(1)) == (False, wrong)
        bodies = [there.pool.pages[page] for page in TARGETS]
        assert bodies == [content(n) for n in NUMBERS[:wrong]] + [EMPTY] * (len(NUMBERS) - wrong)
        here.transfer_agent.end_move(1)
        rig.until(lambda: 1 in here.told)
        rig.assert_nothing_left()


def test_the_first_page_is_shown_alone_and_the_next_together_no_more_than_there_is_room_for() -> None:
    with peer_rig() as rig:
        here, there = both(rig)
        here.export(1, *NUMBERS)
        know_of_all(rig, here, there)
        puller = Puller(here, range(20))
        frames: list[range] = []
        rig.until(lambda: puller.connection.wait(0))
        while sum(map(len, frames)) < 8:  # a quarter of the slots that exports have
            frames.append(puller.shown(rig))
            rig.go_on_for(0.05)
        assert len(frames[0]) == 1 and max(map(len, frames)) <= 4
        rig.go_on_for(0.2)
        assert not puller.connection.wait(0)
        puller.taken(frames[-1][-1])  # which says it of all before
        rig.until(lambda: puller.connection.wait(0))
        assert puller.shown(rig).start == 8
        puller.connection.close()
        here.transfer_agent.end_move(1)
        rig.until(lambda: 1 in here.told)
        rig.assert_nothing_left()


@pytest.mark.parametrize("page", deep_after(1, [2**31, 7]))
def test_what_was_never_shown_cannot_be_taken(page: int) -> None:
    with peer_rig() as rig:
        here, there = both(rig)
        here.export(1, *NUMBERS, offered=3)
        know_of_all(rig, here, there)
        puller = Puller(here, range(20))
        rig.until(lambda: puller.connection.wait(0))
        puller.taken(page)
        rig.go_on_for(0.2)
        assert puller.ended()
        puller.connection.close()
        here.transfer_agent.end_move(1)
        rig.until(lambda: 1 in here.told)
        rig.assert_nothing_left()


@pytest.mark.deep
def test_an_export_that_ends_while_pages_of_a_frame_are_taken_frees_their_slots() -> None:
    with peer_rig() as rig:
        here, there = both(rig)
        here.export(1, *NUMBERS)
        know_of_all(rig, here, there)
        puller = Puller(here, range(20))
        rig.until(lambda: puller.connection.wait(0))
        last = puller.shown(rig)
        rig.go_on_for(0.1)
        here.transfer_agent.end_move(1)
        assert rig.until(lambda: 1 in here.told) < LATE_S
        puller.taken(last[-1])
        rig.go_on_for(0.1)
        assert puller.ended()
        puller.connection.close()
        rig.assert_nothing_left()


@pytest.mark.deep
def test_a_puller_that_goes_in_the_middle_of_a_frame_leaves_no_slot_behind() -> None:
    with peer_rig() as rig:
        here, there = both(rig)
        here.export(1, *NUMBERS)
        know_of_all(rig, here, there)
        for _ in range(3):
            puller = Puller(here, range(20))
            rig.until(lambda puller=puller: puller.connection.wait(0))  # type: ignore[misc]  # a lambda's default
            puller.taken(puller.shown(rig)[0])
            rig.go_on_for(0.05)
            puller.connection.close()
        there.pull(1, here.sources, NUMBERS, TARGETS)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        assert there.told[1].ok
        rig.assert_nothing_left()

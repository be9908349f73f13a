"""Exports in the KV transfer agent's process: who finds them, whose pages they are, and that every slot goes back
once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import MoveKind, PageMove
from quire_common.errors import NotFound
from quire_common.kv_data.frame import DataConnectionError
from quire_common.kv_data.lease_key import NO_KEY, handle_of
from quire_worker.kv_transfer.handlers import AgentContext
from quire_worker.kv_transfer.job_queue import Job
from quire_worker.kv_transfer.peers import export_registry
from quire_worker.kv_transfer.peers.export import Export
from quire_worker.kv_transfer.peers.export_registry import ENGINE_SILENT_S, ExportRegistry
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.setup import AgentSetup
from quire_worker.kv_transfer.wire import AgentFrameKind
from quire_worker.side_process.frames import Frame
from tests.fakes.kv_transfer.agent_rig import NAMESPACE, PAGE_BYTES, digest

KEY = b"k" * 32
NOW = 0.0


class Holder:
    stopped = 0

    def stop(self) -> None:
        self.stopped += 1


class Rig:
    """A desk and what it said. `silence_s` is the engine's."""

    def __init__(self, slots: int = 16) -> None:
        self.said: list[Frame] = []
        self.silence_s = 0.0
        self.ring = Ring.create(PAGE_BYTES, slots)
        setup = AgentSetup("", NAMESPACE.hex(), "int32", PAGE_BYTES, slots, peers=True)
        self.desk = ExportRegistry(AgentContext(setup, self.ring, self.said.append, (), lambda: self.silence_s))

    def put(self, number: int, pages: int = 6, key: bytes = KEY, generation: int = 0) -> Export:
        hashes = tuple(digest(page) for page in range(pages))
        move = PageMove(number, MoveKind.EXPORT, 0, ids(*range(1, pages + 1)), hashes, b"id", lease_key=key)
        self.desk.start_job(Job(move, generation, 0))
        found = self.desk.find_export(handle_of(key))
        assert found is not None and found[1] is not None
        return found[1]

    def told(self, kind: AgentFrameKind) -> list[list[int]]:
        return [frame.numbers() for frame in self.said if frame.kind is kind]

    def released(self) -> list[int]:
        return [slot for slots in self.told(AgentFrameKind.RELEASED) for slot in slots]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.ring.close()


def test_an_export_is_found_by_its_lease_until_it_ends_and_known_for_a_while_after(rig: Rig) -> None:
    export, handle = rig.put(1), handle_of(KEY)
    assert rig.desk.find_export(handle) == (KEY, export) and rig.desk.find_export(b"x" * 16) is None
    rig.desk.cancel_job(2)
    rig.desk.cancel_job(1)
    assert rig.desk.find_export(handle) == (KEY, None) and export.over and rig.said == []
    again = rig.put(2)  # the same transfer, after its request has lost its slot
    assert rig.desk.find_export(handle) == (KEY, again)


@pytest.mark.parametrize("end", ["cut", "cancel"])
def test_who_asks_after_the_engine_has_ended_an_export_is_told_so_however_late_the_desk_hears(
    rig: Rig, end: str
) -> None:
    export, found = rig.put(1), queue.SimpleQueue[tuple[bytes, Export | None] | None]()
    rig.ring.cancellations = 1
    asking = threading.Thread(target=lambda: found.put(rig.desk.find_export(handle_of(KEY))))
    asking.start()
    with pytest.raises(queue.Empty):
        found.get(timeout=0.1)
    rig.desk.cancel_job(1) if end == "cut" else rig.desk.cancel_before(1)
    assert found.get(timeout=60) == (KEY, None) and export.over
    asking.join()


def test_a_desk_that_does_not_hear_which_exports_have_ended_answers_for_none(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_registry, "CANCELLATION_TIMEOUT_S", 0.01)
    rig.put(1)
    rig.ring.cancellations = 1
    with pytest.raises(DataConnectionError, match="does not hear"):
        rig.desk.find_export(handle_of(KEY))


def test_when_the_peer_has_all_it_is_told_once(rig: Rig) -> None:
    export = rig.put(1)
    rig.desk.finish_export(export)
    rig.desk.report_finished(export, "tcp")
    assert [frame.subject for frame in rig.said] == [1] and rig.told(AgentFrameKind.ENDED) == [[6, 2]]
    with pytest.raises(NotFound):
        rig.desk.finish_export(export)
    assert len(rig.said) == 1


def test_a_new_run_ends_those_of_the_last_and_no_others(rig: Rig) -> None:
    before, after = rig.put(1), rig.put(2, key=b"o" * 32, generation=1)
    rig.desk.cancel_before(1)
    assert before.over and not after.over


@pytest.mark.parametrize("key", [b"", b"short", NO_KEY, KEY])
def test_an_export_without_a_key_of_its_own_fails(rig: Rig, key: bytes) -> None:
    export = rig.put(1)
    rig.desk.start_job(Job(PageMove(2, MoveKind.EXPORT, 0, ids(1), (digest(1),), lease_key=key), 0, 0))
    assert [frame.subject for frame in rig.said] == [2] and rig.told(AgentFrameKind.ENDED) == [[0, 0]]
    assert rig.desk.find_export(handle_of(KEY)) == (KEY, export)


def test_pages_are_asked_for_once_and_are_their_takers(rig: Rig) -> None:
    export, holder = rig.put(1), Holder()
    rig.desk.take_over(export, holder)
    rig.desk.request_pages(export, holder, [0, 1], 9)
    rig.desk.request_pages(export, holder, [1, 2], 9)
    assert rig.told(AgentFrameKind.WANTED) == [[0, 1], [2]]
    rig.desk.filled(0, 1, [(0, 8), (1, 9)])
    assert (export.take_slot(holder, 0, NOW), export.take_slot(holder, 1, NOW), export.take_slot(holder, 2, NOW)) == (
        8,
        9,
        None,
    )
    rig.desk.release([8])
    rig.desk.filled(0, 1, [(2, 10)])
    rig.desk.detach(export, holder)
    assert rig.released() == [8, 10]  # 9 is still the holder's


def test_who_comes_again_takes_over(rig: Rig) -> None:
    export, first, second = rig.put(1), Holder(), Holder()
    rig.desk.take_over(export, first)
    rig.desk.request_pages(export, first, [3, 4], 9)
    rig.desk.filled(0, 1, [(3, 8)])
    rig.desk.take_over(export, second)
    assert first.stopped == 1 and rig.released() == [8]
    with pytest.raises(NotFound):
        export.take_slot(first, 3, NOW)
    rig.desk.detach(export, first)
    rig.desk.request_pages(export, first, [5], 9)
    rig.desk.request_pages(export, second, [0, 1], 9)
    assert rig.told(AgentFrameKind.WANTED) == [[3, 4], [0, 1]]
    rig.desk.filled(0, 1, [(0, 9)])
    assert export.take_slot(second, 0, NOW) == 9


def test_what_an_earlier_holder_asked_for_keeps_no_slot_from_the_next_one(rig: Rig) -> None:
    """With one slot, page 4 would lie there, and page 0 would never be filled."""
    export, first, second = rig.put(1), Holder(), Holder()
    rig.desk.take_over(export, first)
    rig.desk.request_pages(export, first, [4], 9)
    rig.desk.take_over(export, second)
    rig.desk.request_pages(export, second, [0], 9)
    rig.desk.filled(0, 1, [(4, 8)])
    assert rig.released() == [8]
    rig.desk.filled(0, 1, [(0, 8)])
    assert export.take_slot(second, 0, NOW) == 8
    rig.desk.request_pages(export, second, [4], 9)
    assert rig.told(AgentFrameKind.WANTED) == [[4], [0], [4]]


def test_pages_that_come_when_nobody_is_there_go_back(rig: Rig) -> None:
    export, holder = rig.put(1), Holder()
    rig.desk.take_over(export, holder)
    rig.desk.request_pages(export, holder, [0, 1, 2], 9)
    rig.desk.detach(export, holder)
    rig.desk.filled(0, 1, [(0, 8)])
    rig.desk.cancel_job(1)
    rig.desk.filled(0, 1, [(1, 9)])
    rig.desk.filled(0, 77, [(0, 10)])
    assert rig.released() == [8, 9, 10]
    with pytest.raises(NotFound):
        rig.desk.take_over(export, holder)


@pytest.mark.parametrize("end", ["cut", "take over", "fill"])
def test_who_waits_is_woken(rig: Rig, end: str) -> None:
    export, holder, found = rig.put(1), Holder(), list[object]()
    rig.desk.take_over(export, holder)
    rig.desk.request_pages(export, holder, [0], 9)

    def wait() -> None:
        try:
            found.append(export.take_slot(holder, 0, 60))
        except NotFound as error:
            found.append(error.code)

    waiter = threading.Thread(target=wait)
    waiter.start()
    if end == "cut":
        rig.desk.cancel_job(1)
    elif end == "take over":
        rig.desk.take_over(export, Holder())
    else:
        rig.desk.filled(0, 1, [(0, 8)])
    waiter.join(30)
    assert found == [8 if end == "fill" else "EXPORT_ENDED"]


def test_an_engine_that_says_nothing_is_silent(rig: Rig) -> None:
    assert not rig.desk.engine_is_silent()
    rig.silence_s = ENGINE_SILENT_S + 0.1
    assert rig.desk.engine_is_silent()


@pytest.mark.parametrize(("slots", "window"), [(2, 1), (8, 1), (16, 2), (64, 8), (1024, 8)])
def test_one_export_has_a_share_of_the_slots(slots: int, window: int) -> None:
    rig = Rig(slots)
    assert rig.desk.window == window
    rig.ring.close()

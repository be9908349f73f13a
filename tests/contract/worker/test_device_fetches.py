"""Pages that the device reads from a peer's memory: the next ones alone are asked for, and they count once kept."""

from __future__ import annotations

import pytest
import torch

from bench.harness.plain_pages import ids
from quire_common.credit import MoveKind, PageMove
from quire_common.errors import Internal, InvalidArgument, QuireError
from quire_worker.arrays import Int32
from quire_worker.engine.device import hung
from quire_worker.kv_transfer.agent_process import AgentProcess
from quire_worker.kv_transfer.copier import HostCopier
from quire_worker.kv_transfer.device_fetches import DeviceFetches
from quire_worker.kv_transfer.open_move import OpenMove
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.setup import AgentSetup
from quire_worker.kv_transfer.wire import AgentFrameKind
from quire_worker.side_process.frames import Frame, WireError
from tests.fakes.kv_transfer.agent_rig import NAMESPACE, BytesPool, digest


class Reader(HostCopier):
    """Implements Copier: notes what it is asked for. `ended`: reads have."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(BytesPool(1, ring.page_bytes), ring)
        self.asked: list[tuple[list[int], list[int]]] = []
        self.ended = False

    def fetch(self, memory: bytes, source: Int32, target: Int32) -> None:
        self.asked.append((source.tolist(), target.tolist()))

    def is_complete(self, ticket: int) -> bool:
        return self.ended


class FailingReader(Reader):
    """A GPU without memory, or whose compiler fails. `drained`: nothing is written any more."""

    def __init__(self, ring: Ring, error: Exception) -> None:
        super().__init__(ring)
        self.error = error
        self.fails_to = "fetch"
        self.drained = 0

    def prepare_fetch(self) -> None:
        raise self.error

    def fetch(self, memory: bytes, source: Int32, target: Int32) -> None:
        super().fetch(memory, source, target)
        if self.fails_to == "fetch":
            raise self.error

    def record_event(self) -> int:
        if self.fails_to == "record_event":
            raise self.error
        return super().record_event()

    def drain(self) -> None:
        self.drained += 1


class CompilationError(Exception):
    """As Triton's, which has no base of its own."""


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    CompilationError("at line 1"),
    OSError("ptxas"),
    InvalidArgument("BAD_PAGE", "No such page.", "Ask for another."),
]


class Rig:
    def __init__(self) -> None:
        self.ring = Ring.create(4096, 1)
        self.reader = Reader(self.ring)
        self.answers: list[int] = []
        self.fetches = self.with_reader(self.reader)
        hashes = tuple(digest(page) for page in range(4))
        self.opened = OpenMove(PageMove(1, MoveKind.PULL, 0, ids(31, 32, 33, 34), hashes), 1)

    def with_reader(self, reader: Reader, *, able: bool = True) -> DeviceFetches:
        return DeviceFetches(reader, lambda opened, pages: self.answers.append(pages), able=able)

    def ask(self, *wanted: int) -> None:
        self.fetches.begin(self.opened, Frame.of(AgentFrameKind.FETCH, 0, 1, wanted).column())


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.ring.close()
    return made


def test_pages_are_fetched_in_parts_and_count_once_they_are_kept(rig: Rig) -> None:
    rig.ask(0, 7, 5)
    assert rig.reader.asked == [([7, 5], [31, 32])] and rig.answers == []
    rig.reader.ended = True
    assert rig.fetches.finish_fetches() == [rig.opened] and rig.answers == [2]
    rig.ask(2, 9, 8)
    assert rig.reader.asked[1] == ([9, 8], [33, 34]) and rig.fetches.finish_fetches() == [rig.opened]
    assert rig.opened.in_ring == 0
    rig.fetches.keep(rig.opened, 4)
    assert rig.opened.in_ring == rig.opened.in_pool == 4


@pytest.mark.parametrize(
    "wanted", [(), (0,), (1, 7), (-1, 7), (0, 1, 2, 3, 4, 5)], ids=["nothing", "none", "later", "before", "too many"]
)
def test_other_pages_than_the_next_are_refused(rig: Rig, wanted: tuple[int, ...]) -> None:
    with pytest.raises(WireError):
        rig.ask(*wanted)
    assert rig.reader.asked == []


def test_while_some_are_under_way_no_more_are_asked_for(rig: Rig) -> None:
    rig.ask(0, 7, 5)
    with pytest.raises(WireError):
        rig.ask(2, 9)


@pytest.mark.parametrize(("pages", "counted"), [(4, 4), (3, 0), (0, 0)])
def test_the_end_of_the_move_says_whether_what_was_fetched_last_counts(rig: Rig, pages: int, counted: int) -> None:
    rig.reader.ended = True
    rig.ask(0, 7, 5, 9, 8)
    rig.fetches.finish_fetches()
    rig.fetches.end(rig.opened, pages)
    assert rig.opened.in_ring == rig.opened.in_pool == counted


def test_what_was_not_kept_is_fetched_again(rig: Rig) -> None:
    rig.reader.ended = True
    rig.ask(0, 7, 5)
    rig.fetches.finish_fetches()
    rig.fetches.keep(rig.opened, 0)
    rig.ask(0, 6)
    assert rig.reader.asked[-1] == ([6], [31])
    with pytest.raises(WireError):
        rig.fetches.keep(rig.opened, 3)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("fails_to", ["fetch", "record_event"])
def test_an_error_of_the_device_is_that_moves_miss(rig: Rig, error: Exception, fails_to: str) -> None:
    reader = FailingReader(rig.ring, error)
    reader.fails_to = fails_to
    rig.fetches = rig.with_reader(reader)
    rig.ask(0, 7, 5)
    assert rig.answers == [-1] and not rig.opened.fetching and rig.fetches.finish_fetches() == []
    assert reader.drained == (not isinstance(error, QuireError))
    reader.fails_to = ""
    reader.ended = True
    rig.ask(0, 7, 5)
    assert rig.fetches.finish_fetches() == [rig.opened] and rig.answers == [-1, 2]


def test_device_that_hangs_behind_a_fetch_raises_device_hung(rig: Rig) -> None:
    reader = FailingReader(rig.ring, hung(30.0))
    reader.fails_to = "record_event"
    rig.fetches = rig.with_reader(reader)
    with pytest.raises(Internal, match="DEVICE_HUNG"):
        rig.ask(0, 7, 5)
    assert rig.answers == []


def test_a_device_that_could_not_get_ready_is_not_asked(rig: Rig) -> None:
    rig.fetches = rig.with_reader(rig.reader, able=False)
    rig.ask(0, 7, 5)
    assert rig.answers == [-1] and rig.reader.asked == []


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_pages_come_another_way_where_the_device_cannot_get_ready(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    made: list[bool] = []

    def noted(self: AgentProcess, setup: AgentSetup, ring: Ring, *_: object, can_fetch: bool, **__: object) -> None:
        ring.close()
        made.append(can_fetch)

    monkeypatch.setattr(AgentProcess, "__init__", noted)
    setup = AgentSetup("", NAMESPACE.hex(), "int32", 4096, 2, peers=True)
    AgentProcess.start(setup, lambda ring: FailingReader(ring, error))
    AgentProcess.start(setup, Reader)
    assert made == [False, True]


def test_a_process_that_cannot_be_started_leaves_no_ring() -> None:
    rings: list[Ring] = []

    def fail(ring: Ring) -> Reader:
        rings.append(ring)
        raise RuntimeError("no copier")

    with pytest.raises(RuntimeError, match="no copier"):
        AgentProcess.start(AgentSetup("", NAMESPACE.hex(), "int32", 4096, 2), fail)
    assert rings[0].fd < 0

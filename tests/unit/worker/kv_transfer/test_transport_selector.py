"""Which transport carries a move: the first that is open, and the next where one breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from quire_common.errors import NotFound, Unavailable
from quire_common.kv.kv_client import LeaseAccess, TransferCancelled
from quire_common.pages import PageRun
from quire_common.sequence import RequestContext
from quire_worker.kv_transfer.transports import transport_selector
from quire_worker.kv_transfer.transports.fallback import STORE_RULES
from quire_worker.kv_transfer.transports.transport import PageSink, PageSource, PageTransfer, TransportError
from quire_worker.kv_transfer.transports.transport_selector import TransportSelector

CARGO = PageTransfer(PageRun(b"n" * 32, 0, ()), "uint8", 1, LeaseAccess(b"lease"), RequestContext("r"))


class Fake:
    def __init__(self, name: str) -> None:
        self.name = name
        self.needs_attach = name != "grpc"
        self.is_offered = True
        self.fails: Exception | None = None
        self.asked = 0

    def offered(self, access: LeaseAccess) -> bool:
        return self.is_offered

    def probe(self, access: LeaseAccess) -> None:
        self.asked += 1
        if self.fails:
            raise self.fails

    def fetch(self, transfer: PageTransfer[LeaseAccess], sink: PageSink) -> None:
        self.probe(transfer.access)

    def send(self, transfer: PageTransfer[LeaseAccess], page_source: PageSource) -> None:
        self.probe(transfer.access)

    def close(self) -> None:
        self.asked = -1


def probe_threads() -> list[threading.Thread]:
    """The selector's thread: the one of this test, or a thread that has ended."""
    return [each for each in threading.enumerate() if each.name == "transport-probe"] or [finished_thread()]


def finished_thread() -> threading.Thread:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    return thread


class Rig:
    def __init__(self, *names: str) -> None:
        self.now_s = 100.0
        self.fakes = [Fake(name) for name in names]
        self.choice = TransportSelector(self.fakes, lambda: LeaseAccess(b""), lambda: self.now_s)

    def fetch(self) -> list[int]:
        """How often each was asked."""
        for fake in self.fakes:
            fake.asked = 0
        self.choice.fetch(CARGO, None)  # type: ignore[arg-type]  # the fakes do not look at it
        return [fake.asked for fake in self.fakes]


@pytest.fixture
def rig() -> Rig:
    return Rig("shm", "tcp", "grpc")


def test_the_first_that_is_offered_carries(rig: Rig) -> None:
    assert rig.fetch() == [1, 0, 0] and rig.choice.last_used == "shm"
    rig.fakes[0].is_offered = False
    assert rig.fetch() == [0, 1, 0] and rig.choice.last_used == "tcp"


def test_what_breaks_is_made_up_for_and_left_alone_for_longer_and_longer(rig: Rig) -> None:
    rig.fakes[0].fails = TransportError("cut")
    assert rig.fetch() == [1, 1, 0] and rig.choice.last_used == "tcp"
    assert rig.fetch() == [0, 1, 0], "it is not tried at once again"
    pause_s = STORE_RULES.first_pause_s
    for _ in range(10):
        rig.now_s += pause_s - 0.01
        assert rig.fetch() == [0, 1, 0]
        rig.now_s += 0.02
        assert rig.fetch() == [1, 1, 0]
        pause_s = min(2 * pause_s, STORE_RULES.max_pause_s)
    assert pause_s == STORE_RULES.max_pause_s
    rig.fakes[0].fails = None
    rig.now_s += STORE_RULES.max_pause_s + 1
    assert rig.fetch() == [1, 0, 0] and rig.choice.last_used == "shm"
    rig.fakes[0].fails = TransportError("cut")
    rig.fetch()
    rig.now_s += STORE_RULES.first_pause_s + 0.01
    assert rig.fetch() == [1, 1, 0], "what worked begins with a short pause again"


def test_where_none_is_left_that_is_said(rig: Rig) -> None:
    for fake in rig.fakes:
        fake.fails = TransportError("cut")
    with pytest.raises(Unavailable, match="NO_TRANSPORT"):
        rig.fetch()


@pytest.mark.parametrize("error", [NotFound("LEASE_UNKNOWN", "m", "f"), TransferCancelled(), RuntimeError("a bug")])
def test_what_is_no_fault_of_the_way_ends_the_move(rig: Rig, error: Exception) -> None:
    rig.fakes[0].fails = error
    with pytest.raises(type(error)):
        rig.fetch()
    assert [fake.asked for fake in rig.fakes] == [1, 0, 0]
    rig.fakes[0].fails = None
    assert rig.fetch() == [1, 0, 0]


def test_stores_and_probes_choose_alike(rig: Rig) -> None:
    rig.fakes[0].fails = TransportError("cut")
    rig.choice.probe()
    assert rig.choice.last_used == "tcp"
    rig.choice.send(CARGO, None)  # type: ignore[arg-type]  # the fakes do not look at it
    assert [fake.asked for fake in rig.fakes] == [1, 2, 0]
    rig.choice.close()
    assert [fake.asked for fake in rig.fakes] == [-1, -1, -1]


def test_a_probe_of_a_store_that_is_away_says_nothing_and_breaks_nothing() -> None:
    def away() -> LeaseAccess:
        raise Unavailable("GONE", "m", "f")

    choice = TransportSelector([Fake("grpc")], away)
    choice.probe()
    assert choice.last_used == ""


def test_a_store_that_comes_later_is_found_before_the_first_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_selector, "_FIRST_PAUSE_S", 0.001)
    away = [Unavailable("GONE", "m", "f"), Unavailable("GONE", "m", "f")]

    def data_endpoints() -> LeaseAccess:
        if away:
            raise away.pop()
        return LeaseAccess(b"")

    choice = TransportSelector([Fake("grpc")], data_endpoints)
    choice.probe_in_background()
    probe_threads()[0].join(10)
    assert choice.last_used == "grpc" and not away


def test_probing_ends_when_the_selector_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_selector, "_FIRST_PAUSE_S", 3600.0)

    def away() -> LeaseAccess:
        raise Unavailable("GONE", "m", "f")

    choice = TransportSelector([Fake("grpc")], away)
    choice.probe_in_background()
    thread = probe_threads()[0]
    choice.close()
    thread.join(10)
    assert not thread.is_alive() and choice.last_used == ""


@pytest.mark.parametrize(("names", "direct"), [(("shm", "tcp", "grpc"), True), (("tcp",), True), (("grpc",), False)])
def test_leases_are_attached_to_where_that_is_of_use(names: tuple[str, ...], direct: bool) -> None:
    make: Callable[..., Rig] = Rig
    assert make(*names).choice.direct is direct

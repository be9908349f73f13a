"""How long a move waits for a store that answers each time, but late: the whole is bounded, without the engine."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from bench.harness.plain_pages import PlainPageSink, PlainPageSource
from quire_common.kv.kv_client import LeaseAccess
from quire_common.kv_data.connection import DataConnection, ReceivedFrame
from quire_common.kv_data.frame import DataConnectionError, FrameKind, Head
from quire_common.kv_data.lease_key import NONCE_BYTES
from quire_common.kv_data.seal import Seals
from quire_common.pages import HEADER_BYTES
from quire_common.sequence import RequestContext
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.transports import data_link
from quire_worker.kv_transfer.transports.data_link import FLOOR_BYTES_PER_S, FRAME_S, PeerUnreachable
from quire_worker.kv_transfer.transports.shm_transport import ShmTransport
from quire_worker.kv_transfer.transports.tcp_transport import TcpTransport
from quire_worker.kv_transfer.transports.transport import PageTransfer, Transport, TransportError
from tests.unit.kvstore.pages import Clock, body, chain, framed

PAGES = 12
PAGE_BYTES = 64 << 10
RUN = chain("a", PAGES)
ACCESS = LeaseAccess(b"lease", b"k" * 32, "quire-kvstore-" + "0" * 32, 1)
CARGO = PageTransfer(RUN, "uint8", PAGE_BYTES, ACCESS, RequestContext("r"))
LIMIT_S = FRAME_S + PAGES * PAGE_BYTES / FLOOR_BYTES_PER_S


class LateStore(DataConnection):
    """A store without a socket: it does what it is asked, and each answer takes `answer_s`."""

    def __init__(self, clock: Clock, answer_s: float) -> None:
        self._clock = clock
        self._answer_s = answer_s
        self._answers: deque[Head] = deque()
        self._nonces = (bytes(NONCE_BYTES), bytes(NONCE_BYTES))

    def wait(self, timeout_s: float) -> bool:
        return False

    def send(self, head: Head, seals: Seals, payload: memoryview | bytes = b"", fds: Sequence[int] = ()) -> None:
        if head.kind is FrameKind.GET:
            for index in range(PAGES):
                header = framed(RUN, index, PAGE_BYTES)[:HEADER_BYTES]
                self._answers.append(Head(FrameKind.PAGE, head.handle, index, 0, PAGE_BYTES, True, header))
        put = head.kind in (FrameKind.PUT, FrameKind.TAKE)
        self._answers.append(Head(FrameKind.TAKEN if put else FrameKind.END, head.handle, head.page))

    def receive(self) -> ReceivedFrame | None:
        self._clock.now_s += self._answer_s
        return ReceivedFrame(self._answers.popleft(), b"", b"", b"", 0, [])

    def verify_head(self, frame: ReceivedFrame, seals: Seals) -> Head:
        return frame.head

    def receive_payload(self, frame: ReceivedFrame, seals: Seals, into: memoryview) -> None:
        into[:] = body(RUN, frame.head.page, PAGE_BYTES)

    def shut_down(self) -> None:
        pass

    def close(self) -> None:
        pass


class Rig:
    """One move of all pages over `transport`; the engine takes `engine_s` for each page."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ring: Ring) -> None:
        self._monkeypatch = monkeypatch
        self._ring = ring
        self._clock = Clock()
        self.moved = 0
        monkeypatch.setattr(data_link, "time", SimpleNamespace(monotonic=self._clock))

    def move(self, transport: Transport, way: str, answer_s: float, engine_s: float = 0.0) -> None:
        store = LateStore(self._clock, answer_s)
        self._monkeypatch.setattr(data_link, "connect", lambda address, frame_s: store)

        def engine(index: int) -> None:
            self._clock.now_s += engine_s

        if way == "get":
            sink = PlainPageSink(self._ring, engine)
            try:
                transport.fetch(CARGO, sink)
            finally:
                self.moved = sink.received_pages
            return
        page_source = PlainPageSource(self._ring, engine)
        for index in range(PAGES):
            self._ring.slot(index)[:] = body(RUN, index, PAGE_BYTES)
        page_source.request_pages(range(PAGES))
        try:
            transport.send(CARGO, page_source)
        finally:
            self.moved = len(page_source.sent)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    ring = Ring.create(PAGE_BYTES, PAGES)
    yield Rig(monkeypatch, ring)
    gc.collect()  # a page is held by the frames of what was raised
    ring.close()


def tcp() -> Transport:
    return TcpTransport("127.0.0.1:1")


WAYS = pytest.mark.parametrize(("make", "way"), [(tcp, "get"), (tcp, "put"), (ShmTransport, "put")])


@WAYS
def test_a_store_that_is_late_with_each_page_breaks_in_the_middle(
    rig: Rig, make: Callable[[], Transport], way: str
) -> None:
    with pytest.raises(TransportError) as down:
        rig.move(make(), way, answer_s=1.0)
    cause = down.value.__cause__
    assert isinstance(cause, DataConnectionError) and cause.reason == "slow"
    assert 3 <= rig.moved <= LIMIT_S + 1, "what came counts, and no more than one wait follows the limit"


@WAYS
def test_a_store_that_takes_what_it_may_is_waited_for(rig: Rig, make: Callable[[], Transport], way: str) -> None:
    rig.move(make(), way, answer_s=LIMIT_S / (PAGES + 2))
    assert rig.moved == PAGES


@WAYS
def test_what_the_engine_takes_is_not_the_stores(rig: Rig, make: Callable[[], Transport], way: str) -> None:
    rig.move(make(), way, answer_s=0.0, engine_s=10.0)
    assert rig.moved == PAGES


def test_host_name_that_no_resolver_takes_is_an_unreachable_peer() -> None:
    with pytest.raises(PeerUnreachable):
        data_link.connect(("a..example.com", 1))

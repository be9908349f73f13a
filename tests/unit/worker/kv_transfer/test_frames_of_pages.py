"""Pages that a peer shows several at a time: each is compared with what its key says before it is published, and what
goes wrong with one of a frame takes nothing from those before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from bench.harness.plain_pages import PlainPageSink
from quire_common.kv_data.frame import DataConnectionError, FrameKind, pack_places, unpack_places
from quire_common.pages import HEADER_BYTES, copy_body
from quire_common.sequence import RequestContext
from quire_worker.kv_transfer.peers.peer_access import PeerAccess
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.transports import shared_pages
from quire_worker.kv_transfer.transports.data_link import DataLink, Exchange
from quire_worker.kv_transfer.transports.shared_pages import fetch_shared_pages
from quire_worker.kv_transfer.transports.transport import PageTransfer, TransportError
from tests.unit.kvstore.pages import body, chain, framed

PAGES, PAGE_BYTES, FIRST = 6, 4096, 3
RUN = chain("a", PAGES)


class Peer:
    """An exporter at the other end: says `frames`, as first page and payload, and hears what was taken."""

    def __init__(self) -> None:
        self.frames: deque[tuple[int, bytes]] = deque()
        self.taken: list[int] = []
        self.connection = SimpleNamespace(wait=lambda timeout_s: True)

    def show(self, *pages: int) -> None:
        places = [(page * PAGE_BYTES, framed(RUN, page, PAGE_BYTES)[:HEADER_BYTES]) for page in pages]
        self.frames.append((FIRST + pages[0], pack_places(places)))

    def set_time_budget(self, size: int) -> None:
        """There is always time."""

    def send(self, kind: FrameKind, payload: bytes = b"", *, page: int = 0) -> None:
        if kind is FrameKind.TAKEN:
            self.taken.append(page - FIRST)

    def receive_frame(self, *kinds: FrameKind) -> SimpleNamespace:
        if not self.frames:
            return SimpleNamespace(head=SimpleNamespace(kind=FrameKind.END))
        page, payload = self.frames[0]
        return SimpleNamespace(head=SimpleNamespace(kind=FrameKind.SHOWN, page=page, length=len(payload)))

    def receive_payload(self, frame: SimpleNamespace, into: memoryview) -> None:
        into[:] = self.frames.popleft()[1]


class Rig:
    """Pages in memory that can be read from, and a landing beside it."""

    def __init__(self) -> None:
        self.theirs, self.ours = (Ring.create(PAGE_BYTES, PAGES) for _ in range(2))
        for page in range(PAGES):
            self.theirs.slot(page)[:] = body(RUN, page, PAGE_BYTES)
        self.peer, self.sink, self.link = Peer(), PlainPageSink(self.ours), DataLink()

    def take(self) -> None:
        access = PeerAccess(b"k" * 32, FIRST, None, "")
        transfer = PageTransfer(RUN, "uint8", PAGE_BYTES, access, RequestContext("r"))
        exchange = cast("Exchange", self.peer)
        fetch_shared_pages(
            self.link, exchange, FrameKind.GET, transfer, self.sink, lambda _: nullcontext(self.copy), most=1
        )

    def copy(self, place: int, header: bytes, room: memoryview) -> int:
        return copy_body(header, np.frombuffer(self.theirs.memory, np.uint8)[place : place + len(room)], room)

    def came(self) -> int:
        """How many pages have landed, each whole."""
        assert self.sink.bodies() == [body(RUN, page, PAGE_BYTES) for page in range(self.sink.received_pages)]
        return self.sink.received_pages


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.theirs.close()
    made.ours.close()


def test_a_frame_of_pages_is_answered_once(rig: Rig) -> None:
    rig.peer.show(0)
    rig.peer.show(1, 2, 3, 4)
    rig.peer.show(5)
    rig.take()
    assert rig.came() == PAGES and rig.peer.taken == [0, 4, 5]


def test_where_pages_take_long_the_peer_hears_of_each(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pages, "LONG_S", -1.0)
    rig.peer.show(0, 1, 2)
    rig.peer.show(3, 4, 5)
    rig.take()
    assert rig.came() == PAGES and rig.peer.taken == [0, 1, 2, 3, 4, 5]


def test_one_that_was_overwritten_ends_it_after_those_before(rig: Rig) -> None:
    """As when the lease has ended meanwhile, and its slot was filled anew."""
    rig.peer.show(0, 1, 2, 3)
    rig.theirs.slot(2)[100:101] = b"\xff"
    with pytest.raises(TransportError, match="checksum"):
        rig.take()
    assert rig.came() == 2 and rig.peer.taken == []


@pytest.mark.parametrize("pages", [(1,), (0, 2, 1)], ids=["not the next", "out of order"])
def test_pages_in_another_order_are_not_what_they_are_called(rig: Rig, pages: tuple[int, ...]) -> None:
    rig.peer.show(*pages)
    with pytest.raises((DataConnectionError, TransportError)):
        rig.take()
    assert rig.came() == (0 if pages[0] else 1)


def test_more_pages_than_were_asked_for_are_garbage(rig: Rig) -> None:
    rig.peer.show(0, 1, 2, 3, 4, 5)
    rig.peer.frames[0] = (rig.peer.frames[0][0], rig.peer.frames[0][1] + bytes(8 + HEADER_BYTES))
    with pytest.raises(DataConnectionError):
        rig.take()
    assert rig.came() == 0


@pytest.mark.parametrize("size", [0, 1, 8 + HEADER_BYTES - 1, 8 + HEADER_BYTES + 1])
def test_places_that_are_cut_off_are_none(rig: Rig, size: int) -> None:
    with pytest.raises(DataConnectionError):
        unpack_places(bytes(size))
    rig.peer.frames.append((FIRST, bytes(size)))
    with pytest.raises(DataConnectionError):
        rig.take()
    assert rig.came() == 0

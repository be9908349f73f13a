"""Pages that a peer shows: what is there is fetched together, nobody waits for more, and order holds."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quire_common.kv.page_mac import PageMac
from quire_common.kv_data.frame import DataConnectionError, FrameKind, Head, pack_places
from quire_common.pages import PageRun, copy_body, frame_page
from quire_worker.kv_transfer.transports.shared_pages import fetch_shared_pages
from quire_worker.kv_transfer.transports.transport import PageTransfer, TransportError
from tests.fakes.kv_transfer.agent_rig import digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quire_worker.kv_transfer.transports.shared_pages import Copy

SIZE, PAGES = 4096, 5
RUN = PageRun(b"n" * 32, 0, tuple(digest(page) for page in range(PAGES)))
MEMORY = np.random.default_rng(0).integers(0, 256, PAGES * SIZE, dtype=np.uint8)
Frame = tuple[Head, bytes]
END: Frame = (Head(FrameKind.END, b""), b"")
ALIVE: Frame = (Head(FrameKind.ALIVE, b""), b"")


def body(page: int) -> np.ndarray:
    return MEMORY[page * SIZE : (page + 1) * SIZE]


def shown(page: int, place: int = -1, mac: PageMac | None = None) -> Frame:
    header = frame_page(RUN.key(page), "int32", body(page).data, mac)
    payload = pack_places([((page if place < 0 else place) * SIZE, header)])
    return Head(FrameKind.SHOWN, b"", page, length=len(payload)), payload


class Exchange:
    """`bursts`: what comes together. `sent`: what is said to the peer."""

    def __init__(self, *bursts: Sequence[Frame]) -> None:
        self.connection = self
        self._bursts = deque(deque(burst) for burst in bursts)
        self.sent: list[tuple[FrameKind, int]] = []

    def wait(self, timeout_s: float) -> bool:
        return bool(self._bursts[0])

    def set_time_budget(self, size: int) -> None:
        assert size <= PAGES * SIZE

    def receive_frame(self, *kinds: FrameKind) -> Any:
        if not self._bursts[0]:
            self._bursts.popleft()
        head, payload = self._bursts[0].popleft()
        assert head.kind in kinds
        return SimpleNamespace(head=head, payload=payload)

    def receive_payload(self, frame: Any, into: memoryview) -> None:
        into[:] = frame.payload

    def send(self, kind: FrameKind, payload: bytes = b"", page: int = 0) -> None:
        self.sent.append((kind, page))


class PageSink:
    def __init__(self) -> None:
        self.pages: list[bytearray] = []
        self.received_pages = self.told = 0

    def next_buffer(self) -> memoryview:
        self.pages.append(bytearray(SIZE))
        return memoryview(self.pages[-1])

    def commit_page(self) -> None:
        self.received_pages += 1

    def flush(self) -> None:
        self.told = self.received_pages


class Rig:
    def __init__(self, *bursts: Sequence[Frame]) -> None:
        self.exchange: Any = Exchange(*bursts)
        self.sink: Any = PageSink()
        self.fetched: list[list[int]] = []
        self.closed = False

    def take(self, most: int, mac: PageMac | None = None) -> None:
        link: Any = SimpleNamespace(close=self._close)
        nothing: Any = None
        transfer: Any = PageTransfer(RUN, "int32", SIZE, SimpleNamespace(first_index=0), nothing)
        fetch_shared_pages(link, self.exchange, FrameKind.SHOW, transfer, self.sink, self._fetch, most, mac)

    @contextmanager
    def _fetch(self, places: Sequence[int]) -> Iterator[Copy]:
        self.fetched.append([place // SIZE for place in places])
        yield lambda place, header, room: copy_body(header, MEMORY[place : place + SIZE], room)

    def _close(self) -> None:
        self.closed = True


def test_what_is_shown_together_is_fetched_together_up_to_a_limit() -> None:
    rig = Rig([*map(shown, range(PAGES))], [END])
    rig.take(most=3)
    assert rig.fetched == [[0, 1, 2], [3, 4]]
    assert rig.exchange.sent == [(FrameKind.SHOW, 0), *((FrameKind.TAKEN, page) for page in range(PAGES))]
    assert rig.sink.received_pages == PAGES and [*map(bytes, rig.sink.pages)] == [bytes(body(n)) for n in range(PAGES)]


def test_nobody_waits_for_a_page_with_another_in_hand() -> None:
    rig = Rig([shown(0)], [shown(1), shown(2)], [ALIVE], [shown(3), shown(4), END])
    rig.take(most=8)
    assert rig.fetched == [[0], [1, 2], [3, 4]]
    assert rig.sink.told == 3, "the engine is told of what is there before there is nothing to do"


def test_a_page_that_is_not_what_it_is_called_ends_it_with_those_before() -> None:
    rig = Rig([shown(0), shown(1, place=2), shown(2)])
    with pytest.raises(TransportError):
        rig.take(most=8)
    assert rig.fetched == [[0, 2, 2]] and (rig.sink.received_pages, rig.closed) == (1, True)


def test_a_page_read_off_a_network_needs_its_mac() -> None:
    mac = PageMac.from_config("11" * 32)
    rig = Rig([shown(0, mac=mac), shown(1, mac=mac), shown(2)])
    with pytest.raises(TransportError, match="MAC"):
        rig.take(most=8, mac=mac)
    assert (rig.sink.received_pages, rig.closed) == (2, True)


def test_pages_out_of_order_are_fetched_by_nobody() -> None:
    rig = Rig([shown(0), shown(2)])
    with pytest.raises(DataConnectionError, match="1 pages from 2 on are not what comes next"):
        rig.take(most=8)
    assert rig.fetched == []

"""Pages that a peer shows: it names their places, several in a frame, and keeps them there until they have been copied.
This module does not know how the places are read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.columns import pack_i32
from quire_common.kv_data.frame import DataConnectionError, FrameKind, unpack_places
from quire_common.pages import PageCorrupt, check_parts
from quire_worker.kv_transfer.transports.peer_tcp import SOON_S, next_but_alive
from quire_worker.kv_transfer.transports.transport import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from quire_common.kv.page_mac import PageMac
    from quire_worker.kv_transfer.peers.peer_access import PeerAccess
    from quire_worker.kv_transfer.transports.data_link import DataLink, Exchange
    from quire_worker.kv_transfer.transports.transport import PageSink, PageTransfer

    Copy = Callable[[int, bytes, memoryview], int]
    # Given where pages lie.
    Fetch = Callable[[Sequence[int]], AbstractContextManager[Copy]]

# The peer has a time limit for confirmations. If free slots come slowly, each page is confirmed by itself.
LONG_S = 0.1


@dataclass(frozen=True, slots=True)
class _SharedPage:
    """A page that the peer shows. `last`: it is the last page of its frame, and the frame is answered after it."""

    page: int
    place: int
    header: bytes
    last: bool


def fetch_shared_pages(
    link: DataLink,
    exchange: Exchange,
    kind: FrameKind,
    transfer: PageTransfer[PeerAccess],
    sink: PageSink,
    fetch: Fetch,
    most: int,
    mac: PageMac | None = None,
) -> None:
    """Ask for all remaining pages with a frame of this kind. Copy each into the sink from the place that the peer
    shows; `fetch` is called for the pages of one frame, or of several that have arrived, until they are `most` or more.
    The peer is told of copied pages by TAKEN, and at last its END is awaited. `fetch` takes the pages' places, and
    yields a function that copies one page and returns its checksum. `mac`, if given, verifies each page. If a page is
    not what its key, checksum or MAC says, closes the link and raises TransportError. Raises DataConnectionError for
    frames that do not fit, and NotFound if the peer refuses."""
    first = transfer.access.first_index
    try:
        exchange.send(kind, pack_i32(range(first + sink.received_pages, first + len(transfer.run))))
        while sink.received_pages < len(transfer.run):
            shared = _receive_shared(exchange, transfer, sink, most)
            with fetch([each.place for each in shared]) as copy:
                _take_pages(exchange, shared, transfer, sink, copy, mac)
        exchange.receive_frame(FrameKind.END)
    except PageCorrupt as error:
        link.close()
        raise TransportError(str(error)) from error


def _receive_shared(
    exchange: Exchange, transfer: PageTransfer[PeerAccess], sink: PageSink, most: int
) -> list[_SharedPage]:
    """Receive the next pages that the peer shows: those of one frame, for which it waits as long as the peer gives
    signs of life. Whole further frames follow while frames have arrived already, until there are `most` pages or more.
    Before a longer wait, the sink is flushed. Raises DataConnectionError for pages that do not come next."""
    shared: list[_SharedPage] = []
    while sink.received_pages + len(shared) < len(transfer.run) and len(shared) < most:
        if shared and not exchange.connection.wait(0):
            break
        if not shared and not exchange.connection.wait(SOON_S):
            sink.flush()
        frame = next_but_alive(exchange, transfer.page_bytes * (len(shared) + 1), FrameKind.SHOWN)
        payload = bytearray(frame.head.length)
        if payload:
            exchange.receive_payload(frame, memoryview(payload))
        places, page = unpack_places(payload), frame.head.page
        before = sink.received_pages + len(shared)
        if page != transfer.access.first_index + before or before + len(places) > len(transfer.run):
            raise DataConnectionError("garbage", f"{len(places)} pages from {page} on are not what comes next")
        last = page + len(places) - 1
        shared += [_SharedPage(number, *place, number == last) for number, place in enumerate(places, page)]
    return shared


def _take_pages(
    exchange: Exchange,
    shared: Sequence[_SharedPage],
    transfer: PageTransfer[PeerAccess],
    sink: PageSink,
    copy: Copy,
    mac: PageMac | None,
) -> None:
    """Copy each shown page into the sink, check it, and commit it before the next. The peer is told by TAKEN that pages
    were copied: at the end of each frame, or sooner if copying is slow. Raises PageCorrupt for a page that its key,
    checksum or MAC does not match."""
    told_s = time.monotonic()
    for each in shared:
        room = sink.next_buffer()
        checksum = copy(each.place, each.header, room)
        check_parts(
            each.header,
            room,
            transfer.run.key(sink.received_pages),
            transfer.dtype,
            transfer.page_bytes,
            checksum,
            mac,
        )
        if each.last or time.monotonic() - told_s > LONG_S:
            exchange.send(FrameKind.TAKEN, page=each.page)
            told_s = time.monotonic()
        sink.commit_page()

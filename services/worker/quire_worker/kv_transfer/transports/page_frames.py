"""Pages in frames of a data connection: sent to a store, and received from a store or peer.

A few pages at a time are under way to a store, and a page is released when the store has confirmed it. So the next
page's checksum is computed while the store takes in the pages before it. If the connection breaks, all unconfirmed
pages are left for another transport.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from quire_common.kv_data.frame import DataConnectionError, FrameKind
from quire_common.pages import PageCorrupt, check_parts, frame_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.kv.kv_client import LeaseAccess
    from quire_common.kv.page_mac import PageMac
    from quire_common.kv_data.connection import ReceivedFrame
    from quire_worker.kv_transfer.transports.data_link import Exchange
    from quire_worker.kv_transfer.transports.transport import PageSink, PageSource, PageTransfer


_WINDOW_BYTES = 8 << 20
_MAX_WINDOW = 32


def send_pages(
    exchange: Exchange,
    transfer: PageTransfer[LeaseAccess],
    page_source: PageSource,
    put: Callable[[int, bytes, memoryview], None],
    mac: PageMac | None = None,
) -> None:
    """Send all remaining pages by `put(index, header, body)`, with MACs by `mac` if it is given, and wait until the
    store has taken them. Up to 8 MiB of pages (2 to 32) are sent ahead of the store's answers, TAKEN; each answer
    releases a page. Answers are also awaited as soon as one has arrived, and while the next page is not ready. Raises
    the errors of `Exchange`, and TransferCancelled."""
    window = max(2, min(_MAX_WINDOW, _WINDOW_BYTES // transfer.page_bytes))
    waiting: deque[int] = deque()
    for index in list(page_source.remaining):
        while waiting and (len(waiting) >= window or not page_source.is_ready(index) or exchange.connection.wait(0)):
            _await_taken(exchange, waiting, page_source)
        body = page_source.page_body(index)
        put(index, frame_page(transfer.run.key(index), transfer.dtype, body, mac), body)
        waiting.append(index)
    while waiting:
        _await_taken(exchange, waiting, page_source)


def _await_taken(exchange: Exchange, waiting: deque[int], page_source: PageSource) -> None:
    """Wait for the store's answer that it has taken the first of the pages in `waiting`; remove that page and release
    it. Raises DataConnectionError if the answer names another page."""
    frame = exchange.receive_frame(FrameKind.TAKEN)
    if frame.head.page != waiting[0]:
        raise DataConnectionError("garbage", f"page {frame.head.page} was taken before {waiting[0]}")
    page_source.release_page(waiting.popleft())


def receive_parts(
    exchange: Exchange, frame: ReceivedFrame, page: int, transfer: PageTransfer[Any], sink: PageSink
) -> None:
    """Receive the sink's next page in parts, check it, and commit it. `frame` is its first part, which has arrived;
    `page` is its number at the sender. Raises DataConnectionError if a part is not what comes next, PageCorrupt if the
    page is longer than a page or not what its key and MAC say."""
    index, came = sink.received_pages, 0
    while True:
        head = frame.head
        if head.page != page or head.offset != came:
            raise DataConnectionError("garbage", f"page {head.page} from {head.offset} on is not what comes next")
        if came + head.length > transfer.page_bytes:
            raise PageCorrupt(f"a page of more than {transfer.page_bytes} bytes")
        room = sink.next_buffer()
        exchange.receive_payload(frame, room[came : came + head.length])
        came += head.length
        if head.last:
            break
        frame = exchange.receive_frame(FrameKind.PAGE)
    check_parts(
        head.page_header, room[:came], transfer.run.key(index), transfer.dtype, transfer.page_bytes, mac=transfer.mac
    )
    sink.commit_page()

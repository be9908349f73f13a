"""Pages in frames of a data connection: to a store, and from whoever sends them.

To a store a few pages at a time are under way, and a page is gone when the store has it. So the next page's checksum is
computed while the store takes in the last ones, and when the connection breaks, all that it did not answer for is left
for another transport.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from quire_common.kv_data.frame import DataConnectionError, FrameKind
from quire_common.pages import PageCorrupt, check_parts, frame_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.kv.kv_client import LeaseAccess
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
) -> None:
    """All that is left. `put(index, header, body)` sends one page, which the store answers with TAKEN."""
    window = max(2, min(_MAX_WINDOW, _WINDOW_BYTES // transfer.page_bytes))
    waiting: deque[int] = deque()
    for index in list(page_source.remaining):
        while waiting and (len(waiting) >= window or not page_source.is_ready(index) or exchange.connection.wait(0)):
            _settle(exchange, waiting, page_source)
        body = page_source.page_body(index)
        put(index, frame_page(transfer.run.key(index), transfer.dtype, body), body)
        waiting.append(index)
    while waiting:
        _settle(exchange, waiting, page_source)


def _settle(exchange: Exchange, waiting: deque[int], page_source: PageSource) -> None:
    """The store has the page that it was sent first."""
    frame = exchange.receive_frame(FrameKind.TAKEN)
    if frame.head.page != waiting[0]:
        raise DataConnectionError("garbage", f"page {frame.head.page} was taken before {waiting[0]}")
    page_source.release_page(waiting.popleft())


def receive_parts(
    exchange: Exchange, frame: ReceivedFrame, page: int, transfer: PageTransfer[Any], sink: PageSink
) -> None:
    """The next page, whose first frame has arrived, to where it belongs; `page` is its number there. Raises
    DataConnectionError, and PageCorrupt unless it is what its key says."""
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
    check_parts(head.page_header, room[:came], transfer.run.key(index), transfer.dtype, transfer.page_bytes)
    sink.commit_page()

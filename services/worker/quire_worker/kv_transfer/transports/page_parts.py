"""The parts of a page, from frames into its room. Knows nothing of who sends them, or where pages come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire_common.kv_data.frame import DataConnectionError, FrameKind
from quire_common.pages import PageCorrupt, check_parts

if TYPE_CHECKING:
    from quire_common.kv_data.connection import ReceivedFrame
    from quire_worker.kv_transfer.transports.data_link import Exchange
    from quire_worker.kv_transfer.transports.transport import PageSink, PageTransfer


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

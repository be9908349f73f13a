"""The parts of a page, from frames into its room. Knows nothing of who sends them, or where pages come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire_common.kv_data.frame import DataConnectionError, Kind
from quire_common.pages import PageCorrupt, check_parts

if TYPE_CHECKING:
    from quire_common.kv_data.connection import ReceivedFrame
    from quire_worker.mover.transports.data_link import Exchange
    from quire_worker.mover.transports.transport import Cargo, Landing


def receive_parts(exchange: Exchange, frame: ReceivedFrame, page: int, cargo: Cargo[Any], landing: Landing) -> None:
    """The next page, whose first frame has arrived, to where it belongs; `page` is its number there. Raises
    DataConnectionError, and PageCorrupt unless it is what its key says."""
    index, came = landing.landed, 0
    while True:
        head = frame.head
        if head.page != page or head.offset != came:
            raise DataConnectionError("garbage", f"page {head.page} from {head.offset} on is not what comes next")
        if came + head.length > cargo.page_bytes:
            raise PageCorrupt(f"a page of more than {cargo.page_bytes} bytes")
        room = landing.room()
        exchange.receive_payload(frame, room[came : came + head.length])
        came += head.length
        if head.last:
            break
        frame = exchange.arrived(Kind.PAGE)
    check_parts(head.page_header, room[:came], cargo.run.key(index), cargo.dtype, cargo.page_bytes)
    landing.land()

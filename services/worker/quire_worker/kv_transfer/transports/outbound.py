"""Pages to the store over a data connection: a few at a time are under way, and a page is gone when the store has it.

So the next page's checksum is computed while the store takes in the last ones, and when the connection breaks, all that
it did not answer for is left for another transport.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from quire_common.kv_data.frame import DataConnectionError, FrameKind
from quire_common.pages import frame_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.kv_client import LeaseAccess
    from quire_worker.kv_transfer.transports.data_link import Exchange
    from quire_worker.kv_transfer.transports.transport import PageSource, PageTransfer

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

"""Pages that a peer shows one by one, and keeps until they have been taken from where they lie. Knows nothing of how
they are reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.columns import pack_i32
from quire_common.kv_data.frame import DataBroken, Kind
from quire_common.pages import PageCorrupt, check_parts
from quire_worker.mover.transports.peer_tcp import SOON_S, next_but_alive
from quire_worker.mover.transports.transport import TransportDown

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.mover.peers.peer_access import PeerAccess
    from quire_worker.mover.transports.data_link import DataLink, Exchange
    from quire_worker.mover.transports.transport import Cargo, Landing

    Copy = Callable[[int, bytes, memoryview], int]


def take_shown(
    link: DataLink, exchange: Exchange, kind: Kind, cargo: Cargo[PeerAccess], landing: Landing, copy: Copy
) -> None:
    """All pages from the next one on, asked for with a frame of that kind. `copy` fills a room from a place and returns
    its checksum under a header. Raises TransportDown where a page is not what its key says."""
    first = cargo.access.first_index
    try:
        exchange.send(kind, pack_i32(range(first + landing.landed, first + len(cargo.run))))
        while landing.landed < len(cargo.run):
            _take_page(exchange, cargo, landing, copy)
        exchange.arrived(Kind.END)
    except PageCorrupt as error:
        link.close()
        raise TransportDown(str(error)) from error


def _take_page(exchange: Exchange, cargo: Cargo[PeerAccess], landing: Landing, copy: Copy) -> None:
    index = landing.landed
    if not exchange.connection.wait(SOON_S):
        landing.tell()
    head = next_but_alive(exchange, cargo.page_bytes, Kind.TAKE).head
    if head.page != cargo.access.first_index + index:
        raise DataBroken("garbage", f"page {head.page} is not what comes next")
    room = landing.room()
    checksum = copy(head.offset, head.page_header, room)
    check_parts(head.page_header, room, cargo.run.key(index), cargo.dtype, cargo.page_bytes, checksum)
    exchange.send(Kind.TAKEN, page=head.page)
    landing.land()

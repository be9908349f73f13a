"""Pages that a peer shows, and keeps until they have been taken from where they lie. Knows nothing of how they are
reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.columns import pack_i32
from quire_common.kv_data.frame import DataBroken, Kind
from quire_common.pages import PageCorrupt, check_parts
from quire_worker.mover.transports.peer_tcp import SOON_S, next_but_alive
from quire_worker.mover.transports.transport import TransportDown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from quire_common.kv_data.frame import Head
    from quire_worker.mover.peers.peer_access import PeerAccess
    from quire_worker.mover.transports.data_link import DataLink, Exchange
    from quire_worker.mover.transports.transport import Cargo, Landing

    Copy = Callable[[int, bytes, memoryview], int]
    # Given where pages lie.
    Fetch = Callable[[Sequence[int]], AbstractContextManager[Copy]]


def take_shown(
    link: DataLink, exchange: Exchange, kind: Kind, cargo: Cargo[PeerAccess], landing: Landing, fetch: Fetch, most: int
) -> None:
    """All pages from the next one on, asked for with a frame of that kind. Those that are shown at once, up to `most`,
    are fetched at once: with what `fetch` gives, a room is filled from a place, and the checksum under a header is
    returned. Raises TransportDown where a page is not what its key says."""
    first = cargo.access.first_index
    try:
        exchange.send(kind, pack_i32(range(first + landing.landed, first + len(cargo.run))))
        while landing.landed < len(cargo.run):
            shown = _shown(exchange, cargo, landing, most)
            with fetch([head.offset for head in shown]) as copy:
                for head in shown:
                    _take_page(exchange, head, cargo, landing, copy)
        exchange.arrived(Kind.END)
    except PageCorrupt as error:
        link.close()
        raise TransportDown(str(error)) from error


def _shown(exchange: Exchange, cargo: Cargo[PeerAccess], landing: Landing, most: int) -> list[Head]:
    """The next pages that are there: one, however long that takes, and what has come with it."""
    shown: list[Head] = []
    while landing.landed + len(shown) < len(cargo.run) and len(shown) < most:
        if shown and not exchange.connection.wait(0):
            break
        if not shown and not exchange.connection.wait(SOON_S):
            landing.tell()
        head = next_but_alive(exchange, cargo.page_bytes * (len(shown) + 1), Kind.TAKE).head
        if head.page != cargo.access.first_index + landing.landed + len(shown):
            raise DataBroken("garbage", f"page {head.page} is not what comes next")
        shown.append(head)
    return shown


def _take_page(exchange: Exchange, head: Head, cargo: Cargo[PeerAccess], landing: Landing, copy: Copy) -> None:
    room = landing.room()
    checksum = copy(head.offset, head.page_header, room)
    check_parts(head.page_header, room, cargo.run.key(landing.landed), cargo.dtype, cargo.page_bytes, checksum)
    exchange.send(Kind.TAKEN, page=head.page)
    landing.land()

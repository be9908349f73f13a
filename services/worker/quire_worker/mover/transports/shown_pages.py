"""Pages that a peer shows, several in a frame, and keeps until they have been taken from where they lie. Knows nothing
of how they are reached."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.columns import pack_i32
from quire_common.kv_data.frame import DataConnectionError, Kind, unpack_places
from quire_common.pages import PageCorrupt, check_parts
from quire_worker.mover.transports.peer_tcp import SOON_S, next_but_alive
from quire_worker.mover.transports.transport import TransportDown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from quire_worker.mover.peers.peer_access import PeerAccess
    from quire_worker.mover.transports.data_link import DataLink, Exchange
    from quire_worker.mover.transports.transport import Cargo, Landing

    Copy = Callable[[int, bytes, memoryview], int]
    # Given where pages lie.
    Fetch = Callable[[Sequence[int]], AbstractContextManager[Copy]]

# The peer loses patience with who takes nothing: where rooms come slowly it hears of each page.
LONG_S = 0.1


@dataclass(frozen=True, slots=True)
class _Shown:
    """A page. `last`: of its frame, which is answered then."""

    page: int
    place: int
    header: bytes
    last: bool


def take_shown(
    link: DataLink, exchange: Exchange, kind: Kind, cargo: Cargo[PeerAccess], landing: Landing, fetch: Fetch, most: int
) -> None:
    """All pages from the next one on, asked for with a frame of that kind. Those that are shown at once, in frames as
    long as they are fewer than `most`, are fetched at once: with what `fetch` gives, a room is filled from a place, and
    the checksum under a header is returned. Raises TransportDown where a page is not what its key says."""
    first = cargo.access.first_index
    try:
        exchange.send(kind, pack_i32(range(first + landing.landed, first + len(cargo.run))))
        while landing.landed < len(cargo.run):
            shown = _shown(exchange, cargo, landing, most)
            with fetch([each.place for each in shown]) as copy:
                _take_pages(exchange, shown, cargo, landing, copy)
        exchange.arrived(Kind.END)
    except PageCorrupt as error:
        link.close()
        raise TransportDown(str(error)) from error


def _shown(exchange: Exchange, cargo: Cargo[PeerAccess], landing: Landing, most: int) -> list[_Shown]:
    """The next pages that are there: a frame's, however long that takes, and what has come with it."""
    shown: list[_Shown] = []
    while landing.landed + len(shown) < len(cargo.run) and len(shown) < most:
        if shown and not exchange.connection.wait(0):
            break
        if not shown and not exchange.connection.wait(SOON_S):
            landing.tell()
        frame = next_but_alive(exchange, cargo.page_bytes * (len(shown) + 1), Kind.SHOWN)
        payload = bytearray(frame.head.length)
        if payload:
            exchange.receive_payload(frame, memoryview(payload))
        places, page = unpack_places(payload), frame.head.page
        before = landing.landed + len(shown)
        if page != cargo.access.first_index + before or before + len(places) > len(cargo.run):
            raise DataConnectionError("garbage", f"{len(places)} pages from {page} on are not what comes next")
        last = page + len(places) - 1
        shown += [_Shown(number, *place, number == last) for number, place in enumerate(places, page)]
    return shown


def _take_pages(
    exchange: Exchange, shown: Sequence[_Shown], cargo: Cargo[PeerAccess], landing: Landing, copy: Copy
) -> None:
    """Each is published once it was compared with what its key says, whatever comes of the next."""
    told_s = time.monotonic()
    for each in shown:
        room = landing.room()
        checksum = copy(each.place, each.header, room)
        check_parts(each.header, room, cargo.run.key(landing.landed), cargo.dtype, cargo.page_bytes, checksum)
        if each.last or time.monotonic() - told_s > LONG_S:
            exchange.send(Kind.TAKEN, page=each.page)
            told_s = time.monotonic()
        landing.land()

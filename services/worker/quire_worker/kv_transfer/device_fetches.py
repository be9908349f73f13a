"""DeviceFetches: pulls whose pages the engine's device reads straight from another worker's memory.

A fetched page lies in the pool but does not count yet. It counts once the process says that the lease held until the
page was read.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from quire_common.credit import MoveKind
from quire_common.errors import Internal, QuireError
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.peers.peer_access import memory_of
from quire_worker.side_process.frames import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit import PageMove
    from quire_worker.arrays import Int32
    from quire_worker.kv_transfer.copier import Copier
    from quire_worker.kv_transfer.open_move import OpenMove

log = get_logger(__name__)
_CANNOT = -1


class DeviceFetches:
    """The fetches of the model thread. `answer` tells the process how many pages of a move were fetched. `able`: the
    copier could be prepared for fetches; otherwise all pulls use another transport."""

    def __init__(self, copier: Copier, answer: Callable[[OpenMove, int], None], *, able: bool = True) -> None:
        self._copier = copier
        self._answer = answer
        self._able = able
        self._under_way: deque[tuple[int, OpenMove, int]] = deque()

    @property
    def is_fetching(self) -> bool:
        """Whether a fetch has begun and not ended."""
        return bool(self._under_way)

    def begin(self, opened: OpenMove, wanted: Int32) -> None:
        """Begin to copy a pull's next pages from the peer's memory. `wanted` holds the index of the first page, then
        the number that each page has in the peer's memory. If this process cannot do that, answers -1. Raises WireError
        unless these are the next pages of a pull that has no fetch under way. Takes no step per page, since the link
        waits meanwhile."""
        move, first, source = opened.move, opened.in_ring + opened.fetched, wanted[1:]
        end = first + len(source)
        if (
            move.kind != MoveKind.PULL
            or opened.fetching
            or not len(source)
            or wanted[0] != first
            or end > len(move.device_page)
        ):
            raise WireError(f"{len(source)} pages from {wanted[:1]} on are not those that are to be fetched next")
        ticket = self._fetch(move, source, move.device_page[first:end]) if self._able else None
        if ticket is None:
            self._answer(opened, _CANNOT)
            return
        opened.begin_fetch(len(source))
        self._under_way.append((ticket, opened, len(source)))

    def _fetch(self, move: PageMove, source: Int32, target: Int32) -> int | None:
        """Begin a copy from the peer's memory. Returns its ticket, or None if the copy fails; the failure is logged and
        concerns only this move. After an unexpected error, waits for the copies under way, so that none writes once the
        move is over. An error of the GPU in this wait is raised, and so is DEVICE_HUNG."""
        try:
            self._copier.fetch(memory_of(move), source, target)
            return self._copier.record_event()
        except Internal:  # DEVICE_HUNG
            raise
        except QuireError as error:
            log.warning("the other worker's memory cannot be read", code=error.code, error=error.message)
        except Exception:  # out of memory, a kernel that cannot be compiled or launched
            log.exception("pages could not be fetched from the other worker's memory")
            # Some may be on their way: nothing may be written once the move is over. A GPU that is broken says so here.
            self._copier.drain()
        return None

    def keep(self, opened: OpenMove, pages: int) -> None:
        """Count the fetched pages as the move's, since their lease held. If `pages` is 0, they are lost instead. Raises
        WireError for any number but 0 or all."""
        if pages not in (0, opened.fetched):
            raise WireError(f"{pages} pages to be kept of {opened.fetched}")
        opened.keep_fetched(pages)

    def end(self, opened: OpenMove, pages: int) -> None:
        """Settle the last fetched pages of a move that the process has ended: they count if its `pages` whole pages
        include them; else they are lost."""
        self.keep(opened, opened.fetched if opened.in_ring + opened.fetched <= pages else 0)

    def finish_fetches(self) -> list[OpenMove]:
        """Note the end of the fetches whose copies have ended, in the order in which they began, and tell the process
        how many pages each brought. These pages do not count before `keep` or `end`. Returns the moves."""
        settled = []
        while self._under_way and self._copier.is_complete(self._under_way[0][0]):
            _, opened, pages = self._under_way.popleft()
            opened.finish_fetch(pages)
            self._answer(opened, pages)
            settled.append(opened)
        return settled

    def drop(self) -> None:
        """Forget the fetches under way; their pages are lost. The caller has drained the copier, and no answer is
        sent."""
        for _, opened, _ in self._under_way:
            opened.drop_fetch()
        self._under_way.clear()

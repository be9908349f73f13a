"""PeerSession: one connection of a peer that pulls. If the peer does not read, its pages keep their slots only for a
bounded time."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from typing import TYPE_CHECKING

from quire_common.columns import i32, pack_i32
from quire_common.errors import InvalidArgument, QuireError, Unavailable
from quire_common.kv_data.frame import BODY_BYTES, DataConnectionError, FrameKind, Head, pack_places
from quire_common.kv_data.served_session import ServedSession
from quire_common.pages import frame_page
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.peers.export import export_ended, export_unknown
from quire_worker.kv_transfer.transports.peer_nixl import PeerNixl, pack_agent

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.kv_data.connection import DataConnection, ReceivedFrame
    from quire_common.kv_data.seal import Seals
    from quire_worker.kv_transfer.handlers import AgentContext
    from quire_worker.kv_transfer.peers.export import Export
    from quire_worker.kv_transfer.peers.export_registry import ExportRegistry

log = get_logger(__name__)
# A sign of life is sent so often: a peer waits for its next page as long as these come.
ALIVE_S = 0.5
# The longest that a peer which has shown its key may wait before its next request.
IDLE_S = 10.0
# A page may take PAGE_S and its bytes at this rate.
PAGE_S = 2.0
FLOOR_BYTES_PER_S = 20e6
# A page that was filled before is in the ring so soon after it was asked for.
SOON_S = 5e-3
# Most places in one answer.
_MOST_PLACES = 4096


class PeerSession(ServedSession["Export"]):
    """Serves one connection of a peer, which pulls exports by their leases. A refused request ends the connection.
    `transport` is the way by which the peer connected."""

    goes_on_refused = False

    def __init__(
        self, connection: DataConnection, exports: ExportRegistry, context: AgentContext, transport: str
    ) -> None:
        super().__init__(connection, IDLE_S)
        self._exports = exports
        self._ring = context.ring
        self._dtype = context.setup.dtype
        self._mac = None if connection.local else context.mac
        self._page_s = PAGE_S + context.setup.page_bytes / FLOOR_BYTES_PER_S
        self._handlers[FrameKind.DONE] = self._done
        if connection.local:
            self._handlers |= {FrameKind.MAP: self._map, FrameKind.GET: self._show}
        else:
            self._handlers |= {FrameKind.GET: self._get}
        if context.setup.shares_memory:
            self._handlers |= {FrameKind.LOCATE: self._locate}
        self._transport = self._page_transport = transport
        self._agents = context.nixl
        self._held = contextlib.ExitStack()
        # Whose places the peer was told last: it may have read there, and waits to hear that the lease stood meanwhile.
        self._placed: Export | None = None
        if context.nixl is not None:
            self._handlers |= {FrameKind.AGENT: self._send_agent_metadata, FrameKind.SHOW: self._show}

    def _on_broken(self, error: DataConnectionError) -> None:
        """Log the reason why the connection ended."""
        log.warning("a peer's connection was ended", reason=error.reason, cause=str(error))

    def _on_end(self) -> None:
        """Let go of the NIXL agent, if it was used."""
        self._held.close()

    def _admit(self, frame: ReceivedFrame) -> tuple[Seals, Export | QuireError]:
        """Find the export that a request names by its lease's handle, and verify the request with the lease's key. From
        then on the session counts as authenticated: IDLE_S is its idle limit, and no new connection replaces it.
        Returns the seals, and the export or the error by which the request is refused and the connection ends: the
        export has ended, or is a new one of a lease for which the peer was told places of an earlier one. Raises
        NotFound for an unknown lease, which ends the connection too, and DataConnectionError for a forged request or as
        `find_export` does."""
        found = self._exports.find_export(frame.head.handle)
        if found is None:
            raise export_unknown()
        key, export = found
        seals = self._connection.server_seals(key)
        self._verify(frame, seals)
        return seals, export_ended() if export is None or self._is_another(export) else export

    def _is_another(self, export: Export) -> bool:
        """Whether this is a new export of the lease, after the peer learned the places of pages of an earlier export
        that has ended. Then the peer may have read other content at those places."""
        before = self._placed
        return before is not None and before is not export and before.handle == export.handle

    def _get(self, frame: ReceivedFrame, seals: Seals, export: Export) -> None:
        """Answer GET: become the holder of the export, send each requested page, in order, as soon as it is in the
        ring. Slots of pages that were sent go back to the engine several at a time, and before a wait for the next
        page. However that ends, all slots go back, and this session is the holder no more. Once all pages are sent, END
        follows."""
        handle, indices = frame.head.handle, self._indices(frame, seals, export)
        self._exports.take_over(export, self)
        emptied: list[int] = []
        try:
            for place, index in enumerate(indices):
                self._release(emptied, soon=export.is_filled(index))
                self._exports.request_pages(export, self, indices[place:], self._exports.window)
                slot = self._wait_for(export, index, handle, seals)
                emptied.append(slot)
                self._send_page(export, index, slot, seals)
        finally:
            self._release(emptied)
            self._exports.detach(export, self)
        self._end(frame.head, seals)

    def _map(self, frame: ReceivedFrame, seals: Seals, export: Export) -> None:
        """Answer MAP: send a read-only descriptor by which the peer can map the ring. Raises DataConnectionError if the
        ring cannot be opened."""
        try:
            fd = os.open(f"/proc/self/fd/{self._ring.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataConnectionError("bad_memory", f"the ring cannot be shared: {error}") from error
        try:
            self._connection.send(Head(FrameKind.END, frame.head.handle), seals, fds=[fd])
        finally:
            os.close(fd)

    def _send_agent_metadata(self, frame: ReceivedFrame, seals: Seals, export: Export) -> None:
        """Answer AGENT: wait until NIXL has started, without a limit but with signs of life, and send the metadata with
        which the peer can read the ring by itself. The NIXL agent is kept until the session ends. Until the next DONE,
        NIXL counts as the transport of the pages. Raises DataConnectionError if the frame has a payload, NIXL cannot
        start or the peer has gone, and Unavailable if the engine is silent."""
        if self._agents is None or frame.head.length:
            raise DataConnectionError("garbage", "there is nothing more to say than that")
        agents, handle = self._agents, frame.head.handle
        self._until(lambda: 1 if agents.await_begun(ALIVE_S) else None, handle, seals)
        payload = pack_agent(self._held.enter_context(agents.using()))
        self._page_transport = PeerNixl.name
        self._connection.send(Head(FrameKind.PLACED, handle, length=len(payload)), seals, payload)

    def _show(self, frame: ReceivedFrame, seals: Seals, export: Export) -> None:
        """Answer a request for pages by naming their places in the ring, and send END at the end. Each page is named as
        soon as it is in the ring, with those that follow it without a gap and are there too, up to `several` in all;
        the first page is named alone. The peer copies them. If a page does not come soon, the peer must first confirm
        all pages that were named. A slot is kept until the peer has confirmed that it has the page. Confirmed slots go
        back to the engine several at a time, and before a longer wait; beside them, at most `window` slots are in use.
        However that ends, all slots go back to the engine, and this session is the holder no more."""
        handle, indices = frame.head.handle, self._indices(frame, seals, export)
        window, waiting, emptied = self._exports.window, deque[tuple[int, int]](), list[int]()
        self._exports.take_over(export, self)
        place = 0
        try:
            while place < len(indices):
                while waiting and (len(waiting) >= window or self._connection.wait(0)):
                    emptied += self._taken(waiting, seals)
                index, room = indices[place], window - len(waiting)
                self._release(emptied, soon=export.is_filled(index))
                self._exports.request_pages(export, self, indices[place:], room)
                slot = export.take_slot(self, index, SOON_S)
                if slot is None:
                    while waiting:
                        emptied += self._taken(waiting, seals)
                    self._release(emptied)
                    slot = self._wait_for(export, index, handle, seals)
                waiting.append((index, slot))
                # The first one alone: while the peer copies it, the next are summed.
                most = min(self._exports.several, room) if place else 1
                for following in indices[place + 1 : place + most]:
                    if following != waiting[-1][0] + 1 or not export.is_filled(following):
                        break
                    waiting.append((following, self._wait_for(export, following, handle, seals)))
                shared = [(number, slot) for number, slot in waiting if number >= index]
                self._send_page_locations(export, shared, seals)
                place += len(shared)
            while waiting:
                emptied += self._taken(waiting, seals)
        finally:
            self._release([*emptied, *(slot for _, slot in waiting)])
            self._exports.detach(export, self)
        self._end(frame.head, seals)

    def _send_page_locations(self, export: Export, shared: list[tuple[int, int]], seals: Seals) -> None:
        """Make the header of each of these consecutive pages, given as (index, slot), from the page's bytes in the
        ring: with its checksum and, if the connection is not local and there is a MAC key, its MAC. Send one SHOWN
        frame, authenticated with `seals`, that has each page's place in the ring and its header."""
        places = []
        for index, slot in shared:
            with self._ring.slot(slot) as body:
                header = frame_page(export.run.key(index), self._dtype, body, self._mac)
            places.append((self._ring.offset_of(slot), header))
        payload = pack_places(places)
        self._connection.send(Head(FrameKind.SHOWN, export.handle, shared[0][0], length=len(payload)), seals, payload)

    def _release(self, slots: list[int], *, soon: bool = False) -> None:
        """Give all these slots back to the engine, and empty the list. If more slots will follow `soon`, do so only
        once there are `several` (see ExportRegistry)."""
        if not soon or len(slots) >= self._exports.several:
            self._exports.release(slots)
            slots.clear()

    def _taken(self, waiting: deque[tuple[int, int]], seals: Seals) -> list[int]:
        """Receive TAKEN, which says that the peer has copied all shown pages up to one of those in `waiting`. Removes
        these pages and returns their slots. Raises DataConnectionError if the peer has gone or sends another frame."""
        frame = self._connection.receive()
        if frame is None:
            raise DataConnectionError("ended", "the peer has gone")
        frame.close_fds()
        head = self._connection.verify_head(frame, seals)
        first, last = waiting[0][0], waiting[-1][0]
        if head.kind is not FrameKind.TAKEN or not first <= head.page <= last:
            raise DataConnectionError(
                "garbage", f"{head.kind.name} of page {head.page} where {first} to {last} are shown"
            )
        slots = []
        while waiting and waiting[0][0] <= head.page:
            slots.append(waiting.popleft()[1])
        return slots

    def _locate(self, frame: ReceivedFrame, seals: Seals, export: Export) -> None:
        """Answer LOCATE: wait until the requested page is filled, as the export's holder, with signs of life to the
        peer. Then send the places of this page and of filled pages after it (4096 at most) in the engine's own memory.
        The peer reads them by itself. Until the next DONE, cuda_ipc counts as the transport of the pages, and a new
        export of this lease is refused. Raises InvalidArgument if the export has no such page, DataConnectionError if
        the frame has a payload, NotFound if the export is over or another session takes it over, and the errors of
        `_until`."""
        handle, first = frame.head.handle, frame.head.page
        if frame.head.length:
            raise DataConnectionError("garbage", "there is nothing more to say than a page")
        if first >= len(export.run):
            raise InvalidArgument(
                "BAD_PAGES", "This page does not belong to the export.", "Ask for pages of the ticket."
            )
        self._exports.take_over(export, self)
        self._page_transport = "cuda_ipc"
        try:
            filled = self._until(lambda: export.await_offer(self, first, ALIVE_S), handle, seals)
        finally:
            self._exports.detach(export, self)
        places = pack_i32(export.job.move.device_page[first : min(filled, first + _MOST_PLACES)])
        self._placed = export
        self._connection.send(Head(FrameKind.PLACED, handle, first, length=len(places)), seals, places)

    def _indices(self, frame: ReceivedFrame, seals: Seals, export: Export) -> list[int]:
        """Receive the page indices of a request, at least one: a frame without any fails its check. Raises
        InvalidArgument unless they ascend strictly and are all pages of the export."""
        asked = bytearray(frame.head.length)
        self._connection.receive_payload(frame, seals, memoryview(asked))
        indices: list[int] = i32(bytes(asked), "pages").tolist()
        ascending = all(before < index for before, index in itertools.pairwise(indices))
        if not ascending or not all(0 <= index < len(export.run) for index in indices):
            raise InvalidArgument(
                "BAD_PAGES", "These are not pages of the export, in order.", "Ask for pages of the ticket."
            )
        return indices

    def _wait_for(self, export: Export, index: int, handle: bytes, seals: Seals) -> int:
        """Wait for a page as long as it takes, and return its slot (see `_until`). Raises NotFound if the export is
        over or has another holder."""
        return self._until(lambda: export.take_slot(self, index, ALIVE_S), handle, seals)

    def _until(self, look: Callable[[], int | None], handle: bytes, seals: Seals) -> int:
        """Call `look`, which waits a while, until it returns a number, and return that; in between the peer is sent
        signs of life. Raises Unavailable if the engine is silent, DataConnectionError if the peer has gone or sends
        anything meanwhile."""
        while (found := look()) is None:
            if self._exports.engine_is_silent():
                raise Unavailable("WORKER_SILENT", "The worker gives no sign of life.", "Compute the pages.")
            if self._connection.wait(0):
                raise DataConnectionError("ended", "the peer has gone, or asks for too much at once")
            self._connection.send(Head(FrameKind.ALIVE, handle), seals)
        return found

    def _send_page(self, export: Export, index: int, slot: int, seals: Seals) -> None:
        """Send a page from its slot, in parts; raises DataConnectionError if the peer takes too long to read it."""
        deadline = time.monotonic() + self._page_s
        with self._ring.slot(slot) as body:
            header = frame_page(export.run.key(index), self._dtype, body, self._mac)
            for start in range(0, len(body), BODY_BYTES):
                with body[start : start + BODY_BYTES] as part:
                    last = start + len(part) == len(body)
                    self._connection.send(
                        Head(FrameKind.PAGE, export.handle, index, start, len(part), last, header), seals, part
                    )
                if time.monotonic() > deadline:
                    raise DataConnectionError("slow", "the peer takes too long over a page")

    def _done(self, frame: ReceivedFrame, seals: Seals, export: Export) -> None:
        """Answer DONE, by which the peer says that it wants no more: end the export, answer END, and only then tell the
        engine, even if END could not be sent, that all pages were carried. Places that the peer was told are forgotten.
        Raises NotFound if the export has ended already."""
        self._placed = None
        self._exports.finish_export(export)
        try:
            self._end(frame.head, seals)
        finally:
            self._exports.report_finished(export, self._page_transport)
            self._page_transport = self._transport  # what comes next on this connection may take another way

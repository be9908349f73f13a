"""DataSession: one data connection of a kvstore's client."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quire_common.columns import i32
from quire_common.errors import QuireError, Unsupported
from quire_common.kv_data.frame import BODY_BYTES, DataConnectionError, FrameKind, Head
from quire_common.kv_data.served_session import ServedSession
from quire_common.pages import HEADER_BYTES
from quire_common.telemetry.logs import get_logger
from quire_kvstore.data.client_memory import ClientMemory

if TYPE_CHECKING:
    from quire_common.kv_data.connection import DataConnection, ReceivedFrame
    from quire_common.kv_data.seal import Seals
    from quire_kvstore.config import KvstoreConfig
    from quire_kvstore.data.data_metrics import DataMetrics
    from quire_kvstore.page_store import PageStore

log = get_logger(__name__)
# Leases whose keys a connection remembers.
_MAX_SEALS = 64


class DataSession(ServedSession[bytes]):
    """One connection. A lease is represented by its name. If the store refuses a request (NOT_FOUND and the like), the
    client gets the error, and the connection goes on."""

    goes_on_refused = True

    def __init__(
        self, connection: DataConnection, store: PageStore, metrics: DataMetrics, config: KvstoreConfig
    ) -> None:
        super().__init__(connection, config.data_idle_s)
        self._store = store
        self._metrics = metrics
        self._transfer_s = config.transfer_timeout_s
        self._max_lent_bytes = config.max_lent_bytes
        self._seals: dict[bytes, Seals] = {}
        self._client_memory: ClientMemory | None = None
        self._put_error: QuireError | None = None
        self._handlers[FrameKind.DAMAGED] = self._verify_page
        if connection.local:
            self._handlers |= {
                FrameKind.MAP: self._send_arena_fd,
                FrameKind.LEND: self._attach_memory,
                FrameKind.TAKE: self._copy_from_client,
            }
        else:
            self._handlers |= {FrameKind.GET: self._get, FrameKind.PUT: self._put}

    def _on_broken(self, error: DataConnectionError) -> None:
        self._metrics.refused(error.reason)
        log.warning("a data connection was ended", reason=error.reason, cause=str(error))

    def _on_end(self) -> None:
        if self._client_memory is not None:
            self._client_memory.close()

    def _admit(self, frame: ReceivedFrame) -> tuple[Seals, bytes]:
        """Find the lease that the frame's handle names, and verify the frame by the lease's key. Returns the
        connection's seals for this lease, and its name. The name is empty for a lease that was used on this connection
        and has ended; the store refuses it. The connection remembers the keys of 64 leases; a further one replaces the
        oldest. Raises DataConnectionError for an unknown handle or a forged frame."""
        handle = frame.head.handle
        found = self._store.lease_key_of(handle)
        seals = self._seals.get(handle)
        if seals is None:
            if found is None:
                raise DataConnectionError("unknown_lease", "no lease has this handle")
            seals = self._connection.server_seals(found[1])
        self._verify(frame, seals)
        if handle not in self._seals:
            if len(self._seals) >= _MAX_SEALS:
                del self._seals[next(iter(self._seals))]
            self._seals[handle] = seals
        return seals, b"" if found is None else found[0]

    def _get(self, frame: ReceivedFrame, seals: Seals, lease: bytes) -> None:
        """Send the pages of the lease whose indices the frame carries (at least one; a frame without any fails its
        check), in parts, then an end frame with their number. The pages are not verified here, but get their
        MACs if there is a key. Raises QuireError for a bad index, or if the lease has ended, also between two pages.
        Raises DataConnectionError if the peer takes longer than `transfer_timeout_s` over them."""
        asked = bytearray(frame.head.length)
        self._connection.receive_payload(frame, seals, memoryview(asked))
        indices = self._store.readable_indices(lease, i32(bytes(asked), "pages").tolist())
        deadline = time.monotonic() + self._transfer_s
        for index in indices:
            with self._store.sendable_page(lease, index) as framed:
                header, body = bytes(framed[:HEADER_BYTES]), framed[HEADER_BYTES:]
                for start in range(0, len(body), BODY_BYTES):
                    part = body[start : start + BODY_BYTES]
                    last = start + len(part) == len(body)
                    head = Head(FrameKind.PAGE, frame.head.handle, index, start, len(part), last, header)
                    self._connection.send(head, seals, part)
                self._metrics.bytes_out.inc(len(framed))
            if time.monotonic() > deadline:
                raise DataConnectionError("slow", "the peer takes too long over its pages")
        self._end(frame.head, seals, len(indices))

    def _put(self, frame: ReceivedFrame, seals: Seals, lease: bytes) -> None:
        """Receive one part of a page into the store; the first part brings the page's header. After the last part,
        confirm the page to the client, also a corrupt one, which the commit drops. Once a part is refused, the rest of
        the page is received and dropped, and the error is raised at the last part."""
        head, first = frame.head, frame.head.offset == 0
        prefix = HEADER_BYTES if first else 0
        if first:
            self._put_error = None
        try:
            if self._put_error is None:
                offset = 0 if first else HEADER_BYTES + head.offset
                with self._store.page_buffer(lease, head.page, offset, prefix + head.length) as buffer:
                    buffer.view[:prefix] = head.page_header[:prefix]
                    self._connection.receive_payload(frame, seals, buffer.view[prefix:])
                self._metrics.bytes_in.inc(prefix + head.length)
                if head.last:
                    self._connection.send(Head(FrameKind.TAKEN, head.handle, head.page), seals)
                return
        except QuireError as error:
            self._put_error = error
        self._connection.receive_payload(frame, seals, memoryview(bytearray(head.length)))
        if head.last:
            raise self._put_error

    def _verify_page(self, frame: ReceivedFrame, seals: Seals, lease: bytes) -> None:
        """Verify a page that the client found damaged, and answer END, with 1 if the page is intact here, else 0; a
        damaged page is dropped."""
        (index,) = self._store.readable_indices(lease, [frame.head.page])
        self._end(frame.head, seals, int(self._store.verify_page(lease, index)))

    def _send_arena_fd(self, frame: ReceivedFrame, seals: Seals, lease: bytes) -> None:
        """Send a read-only descriptor of the arena to a client of this host with a lookup's lease, which then reads
        pages there. Raises NotFound for another lease, Unsupported where the arena cannot be sealed."""
        self._store.readable_indices(lease, ())
        fd = self._store.shareable_fd()
        if fd is None:
            raise Unsupported("NO_SHARED_MEMORY", "The arena cannot be sealed.", "Use the data port.")
        self._connection.send(Head(FrameKind.END, frame.head.handle), seals, fds=[fd])

    def _attach_memory(self, frame: ReceivedFrame, seals: Seals, lease: bytes) -> None:
        """Map the memory whose descriptor the client sends, in place of any that it lent before, and confirm that.
        Raises DataConnectionError unless one descriptor came that can be mapped safely."""
        if len(frame.fds) != 1:
            raise DataConnectionError("garbage", "nothing was lent")
        if self._client_memory is not None:
            self._client_memory.close()
        self._client_memory = ClientMemory(frame.fds.pop(), self._max_lent_bytes)
        self._end(frame.head, seals, 0)

    def _copy_from_client(self, frame: ReceivedFrame, seals: Seals, lease: bytes) -> None:
        """Copy a whole page from the memory that the client lends into the store, with the header from the frame, and
        confirm it to the client, also a corrupt one, which the commit drops. Raises DataConnectionError if no memory
        was lent, or it ends too early, and the errors of `PageStore.page_buffer`."""
        head, client_memory = frame.head, self._client_memory
        if client_memory is None:
            raise DataConnectionError("garbage", "a page of no memory")
        with self._store.page_buffer(lease, head.page) as buffer:
            buffer.view[:HEADER_BYTES] = head.page_header
            buffer.set_checksum(client_memory.copy(head.offset, head.page_header, buffer.view[HEADER_BYTES:]))
            self._metrics.bytes_in.inc(len(buffer.view))
        self._connection.send(Head(FrameKind.TAKEN, head.handle, head.page), seals)

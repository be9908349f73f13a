"""TransportSelector: which transport carries the pages of a move. The fastest that is open; on failure the next, in the
middle of the move. One that failed is left alone for a while, the longer the more often it fails.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import QuireError, Unavailable
from quire_common.kv_data.seal import AVAILABLE
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.transports.grpc_transport import GrpcTransport
from quire_worker.kv_transfer.transports.shm_transport import ShmTransport
from quire_worker.kv_transfer.transports.tcp_transport import TcpTransport
from quire_worker.kv_transfer.transports.transport import TRANSPORTS, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.kv_client import KvClient, LeaseAccess
    from quire_worker.kv_transfer.transports.transport import PageSink, PageSource, PageTransfer, Transport

log = get_logger(__name__)
AUTO = "auto"
CHOICES = (AUTO, *TRANSPORTS)
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0


@dataclass
class _Backoff:
    """Of a transport that has failed; `length_s` is the next one's."""

    until_s: float = 0.0
    length_s: float = FIRST_BACKOFF_S


class TransportSelector:
    """`transports` in order of preference; `data_endpoints` asks the store for its endpoints. Used by the load's and
    the store's thread at once."""

    def __init__(
        self,
        transports: Sequence[Transport],
        data_endpoints: Callable[[], LeaseAccess],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transports = transports
        self._data_endpoints = data_endpoints
        self._clock = clock
        self._lock = threading.Lock()
        self._backoffs = {transport.name: _Backoff() for transport in transports}
        self.last_used = ""
        """What carried pages last, or would."""

    @classmethod
    def from_name(cls, choice: str, kvstore: str, client: KvClient) -> TransportSelector:
        """`choice`: one of CHOICES; all but AUTO leave no other."""
        known: list[Transport] = [GrpcTransport(client)]
        if AVAILABLE:
            known[:0] = [ShmTransport(), TcpTransport(kvstore)]
        return cls([transport for transport in known if choice in (AUTO, transport.name)], client.data_endpoints)

    @property
    def direct(self) -> bool:
        """Whether any of them needs more than a lease's name."""
        return any(transport.name != GrpcTransport.name for transport in self._transports)

    def probe_in_background(self) -> None:
        """Find out and log what will be used, on a thread of its own: the store may not be there yet."""
        threading.Thread(target=self.probe, name="transport-probe", daemon=True).start()

    def probe(self) -> None:
        """The same, here."""
        try:
            access = self._data_endpoints()
            self._try_transports(access, lambda transport: transport.probe(access))
        except QuireError as error:
            log.info("how pages will travel is found out by the first of them", cause=error.message)

    def fetch(self, transfer: PageTransfer[LeaseAccess], sink: PageSink) -> None:
        """See Transport; raises Unavailable where no transport is left."""
        self._try_transports(transfer.access, lambda transport: transport.fetch(transfer, sink))

    def send(self, transfer: PageTransfer[LeaseAccess], page_source: PageSource) -> None:
        """See Transport; raises Unavailable where no transport is left."""
        self._try_transports(transfer.access, lambda transport: transport.send(transfer, page_source))

    def close(self) -> None:
        for transport in self._transports:
            transport.close()

    def _try_transports(self, access: LeaseAccess, attempt: Callable[[Transport], None]) -> None:
        for transport in self._transports:
            if not transport.offered(access) or self._in_backoff(transport):
                continue
            try:
                attempt(transport)
            except TransportError as error:
                self._failed(transport, error)
                continue
            self._worked(transport)
            return
        raise Unavailable(
            "NO_TRANSPORT",
            "No way for pages to the kvstore is open.",
            "Look at the mover's log, and at --kv-transport.",
        )

    def _in_backoff(self, transport: Transport) -> bool:
        with self._lock:
            return self._clock() < self._backoffs[transport.name].until_s

    def _failed(self, transport: Transport, error: TransportError) -> None:
        with self._lock:
            backoff = self._backoffs[transport.name]
            pause_s, backoff.length_s = backoff.length_s, min(2 * backoff.length_s, MAX_BACKOFF_S)
            backoff.until_s = self._clock() + pause_s
        log.warning("a transport is down", transport=transport.name, cause=str(error), again_in_s=pause_s)

    def _worked(self, transport: Transport) -> None:
        with self._lock:
            self._backoffs[transport.name] = _Backoff()
            changed, self.last_used = self.last_used != transport.name, transport.name
        if changed:
            log.info("pages of the kvstore travel", transport=transport.name)

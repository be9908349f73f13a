"""TransportSelector: carries the pages of a move to or from a kvstore, by the first transport that is available, and by
the next one if that fails in the middle."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from quire_common.errors import QuireError, Unavailable
from quire_common.kv_data.seal import AVAILABLE
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.transports.fallback import STORE_RULES, FallbackPolicy
from quire_worker.kv_transfer.transports.registry import Traffic, entries
from quire_worker.kv_transfer.transports.transport import StoreEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.kv.kv_client import KvClient, LeaseAccess
    from quire_worker.kv_transfer.transports.transport import PageSink, PageSource, PageTransfer, Transport

log = get_logger(__name__)
# Between probes of a kvstore that does not answer; longer each time, since it may refuse this worker for good.
_FIRST_PAUSE_S = 0.2
_LAST_PAUSE_S = 30.0


class TransportSelector:
    """`transports` are in order of preference; `data_endpoints` asks the store for its endpoints. The threads of the
    load and of the store use the selector at once."""

    def __init__(
        self,
        transports: Sequence[Transport],
        data_endpoints: Callable[[], LeaseAccess],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transports = transports
        self._data_endpoints = data_endpoints
        self._fallback = FallbackPolicy(STORE_RULES, clock)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._logged_no_answer = False
        self.last_used = ""
        """What carried pages last, or would."""

    @classmethod
    def from_name(cls, choice: str, kvstore: str, client: KvClient) -> TransportSelector:
        """Return a selector of the transports that a choice of --kv-transport leaves open. Without the package for
        keys, transports that need keys are left out."""
        end = StoreEnd(kvstore, client)
        usable = (entry for entry in entries(Traffic.STORE, choice) if AVAILABLE or not entry.needs_keys)
        return cls([entry.make(end) for entry in usable], client.data_endpoints)

    @property
    def direct(self) -> bool:
        """Whether any of them needs more than a lease's name."""
        return any(transport.needs_attach for transport in self._transports)

    def probe_in_background(self) -> None:
        """Find out and log what will be used, on a thread of its own: the store may not be there yet. The thread asks
        until the store answers or `close`. Then the gRPC channel is connected; other transports connect at their first
        move."""
        threading.Thread(target=self._probe_until_answered, name="transport-probe", daemon=True).start()

    def probe(self) -> bool:
        """Ask the store for its endpoints, try which transport is open, and note it as `last_used`; a change is logged.
        A transport that is not open is paused (see FallbackPolicy). Returns whether the store answered, even if no
        transport is open; a refusal counts as no answer. That it does not answer is logged once."""
        try:
            access = self._data_endpoints()
        except QuireError as error:
            if not self._logged_no_answer:
                log.info("the kvstore does not answer yet", cause=error.message)
            self._logged_no_answer = True
            return False
        try:
            self._try_transports(access, lambda transport: transport.probe(access))
        except QuireError as error:
            log.info("how pages will travel is found out by the first of them", cause=error.message)
        return True

    def _probe_until_answered(self) -> None:
        """Probe until the store answers or `close`, with pauses that double from 0.2 to 30 s."""
        pause_s = _FIRST_PAUSE_S
        while not self.probe() and not self._closing.wait(pause_s):
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def fetch(self, transfer: PageTransfer[LeaseAccess], sink: PageSink) -> None:
        """Fetch all remaining pages into the sink, in order, by the transports that the lease allows and that no
        failure has paused, until one succeeds. It may succeed with fewer pages, if the lease or the store has no more.
        Raises Unavailable if none succeeds, QuireError if the store refuses or a call over gRPC fails, PageCorrupt for
        a damaged page, and TransferCancelled."""
        self._try_transports(transfer.access, lambda transport: transport.fetch(transfer, sink))

    def send(self, transfer: PageTransfer[LeaseAccess], page_source: PageSource) -> None:
        """Send all remaining pages to the store by the transports that the lease allows and that no failure has paused,
        until one succeeds. Raises Unavailable if none does, QuireError if the store refuses or a call over gRPC fails,
        and TransferCancelled."""
        self._try_transports(transfer.access, lambda transport: transport.send(transfer, page_source))

    def close(self) -> None:
        """Stop the probing in the background, and close all transports."""
        self._closing.set()
        for transport in self._transports:
            transport.close()

    def _try_transports(self, access: LeaseAccess, attempt: Callable[[Transport], None]) -> None:
        """Attempt the transports that this access allows, in turn, except those that a failure has paused (see
        FallbackPolicy), until one succeeds, and remember it as `last_used`; a change is logged. Raises Unavailable if
        none succeeds. Only a TransportError leads to the next transport; other errors pass through."""
        offered = [transport for transport in self._transports if transport.offered(access)]
        used = self._fallback.try_in_turn(offered, None, attempt)
        if used is None:
            raise Unavailable(
                "NO_TRANSPORT",
                "No way for pages to the kvstore is open.",
                "Look at the transfer agent's log, and at --kv-transport.",
            )
        with self._lock:
            changed, self.last_used = self.last_used != used.name, used.name
        if changed:
            log.info("pages of the kvstore travel", transport=used.name)

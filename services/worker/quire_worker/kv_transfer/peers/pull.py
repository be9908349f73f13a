"""Pull: copies the pages of one move from another worker into the ring or, with `cuda_ipc`, into the pool, on a
thread of its own.

If one transport breaks, the pull continues with the next; the FallbackPolicy, which all pulls share, decides which. The
pull repeats this until two rounds in a row bring no page. It also ends after a round in which the peer was silent. A
silent peer that had answered before also ends the round.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from quire_common.errors import NotFound, QuireError
from quire_common.kv.kv_client import TransferCancelled
from quire_common.pages import PageCorrupt, PageRun
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.kvstore_queues import RingPageSink
from quire_worker.kv_transfer.peers.peer_access import PeerAccess
from quire_worker.kv_transfer.peers.peer_port import FRAME_S
from quire_worker.kv_transfer.peers.pull_end import PoolPageSink, PullEnd
from quire_worker.kv_transfer.peers.tunnel_stream import TunnelDialer
from quire_worker.kv_transfer.transports.data_link import DataLink
from quire_worker.kv_transfer.transports.registry import Traffic, entries
from quire_worker.kv_transfer.transports.transport import PageTransfer, TransportError

if TYPE_CHECKING:
    from quire_worker.kv_transfer.handlers import AgentContext
    from quire_worker.kv_transfer.job_queue import Job
    from quire_worker.kv_transfer.kvstore_queues import SlotSource
    from quire_worker.kv_transfer.peers.connection_pool import ConnectionPool
    from quire_worker.kv_transfer.peers.peer_hosts import PeerHosts
    from quire_worker.kv_transfer.transports.fallback import FallbackPolicy
    from quire_worker.kv_transfer.transports.shared_map import SharedMapCache
    from quire_worker.kv_transfer.transports.transport import FetchTransport

log = get_logger(__name__)
# A ticket may be here before its export is there.
EXPORT_WAIT_S = 1.0
RETRY_S = 0.05
CONNECT_RETRY_S = 0.2
# So often in a row all ways may break without a page having come.
MAX_FRUITLESS_ROUNDS = 2


class Pull:
    """One pull. Its thread calls `run`, then `close`; a pull that gets no thread is closed by its starter. Any thread
    may call `cancel`. `last_used` is the transport that carried pages last."""

    def __init__(
        self,
        job: Job,
        slots: SlotSource,
        context: AgentContext,
        hosts: PeerHosts,
        maps: SharedMapCache,
        fallback: FallbackPolicy,
        connection_pool: ConnectionPool,
    ) -> None:
        self.job = job
        self.last_used = ""
        self._undelivered: list[int] = []
        """Index and slot of pages that have landed and are not told of."""
        setup, move = context.setup, job.move
        run = PageRun(bytes.fromhex(setup.namespace), move.group, move.hashes)
        self._transfer = PageTransfer(
            run, setup.dtype, setup.page_bytes, PeerAccess.from_move(move, hosts), move.context, context.mac
        )
        self._sink = RingPageSink(slots, context.ring, job)
        self._fallback = fallback
        self._connection_pool = connection_pool
        self._complete = False
        self._tunnel = TunnelDialer(setup.service_config())
        self._link, tunnel_link = self._links = DataLink(FRAME_S), DataLink(FRAME_S, self._tunnel)
        self.direct = PoolPageSink(job, self._sink, context.send, lambda: self.is_cancelled)
        access = self._transfer.access
        if access.socket and (before := connection_pool.take_connection(access.socket)) is not None:
            self._link.adopt_connection(access.socket, before)
        end = PullEnd(self._link, tunnel_link, maps, self.direct, context.nixl)
        known: list[FetchTransport[PeerAccess]] = [
            entry.make(end) for entry in entries(Traffic.PEER, setup.peer_transport)
        ]
        self._transports = [transport for transport in known if transport.offered(access)]
        self._met_silence = False
        # Only what the engine keeps listens before the process does that serves it.
        self._may_be_early = access.grpc is not None
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        """Whether the pull was cancelled."""
        return self._cancelled.is_set()

    def add_undelivered(self, index: int, slot: int) -> int:
        """Note a page that has landed in a slot; returns how many such pages the engine has not been told of."""
        self._undelivered += (index, slot)
        return len(self._undelivered) // 2

    def take_undelivered(self) -> list[int]:
        """Remove and return index and slot of the pages that the engine has not been told of, for the caller to tell
        it."""
        undelivered, self._undelivered = self._undelivered, []
        return undelivered

    def cancel(self) -> None:
        """Cancel the pull, from any thread: abort its connections, and wake its thread if that waits for a fetch by the
        engine. The PullManager wakes a thread that waits for a slot."""
        self._cancelled.set()
        self.direct.look()
        for link in self._links:
            link.abort()

    def run(self) -> int:
        """Fetch the pages into ring slots or the pool; returns how many have landed, from the first on. Pages that came
        through the ring were checked against their keys. Before it returns, the engine is told of all pages in slots,
        and an unfilled slot is given back. Cancellation, a wrong page and a QuireError end the pull early; they are not
        raised, but any other exception is. The pull also ends early after rounds without a page, or if the peer is
        silent; this is not logged as such, nor is a cancellation between two fetches. All other early ends are logged,
        and so are failed transports, and addresses of the ticket that may not be dialled."""
        for refusal in self._transfer.access.refusals:
            log.warning("an address of a ticket is not dialled", code=refusal.code, error=str(refusal))
        try:
            self._fetch_with_retries()
            self._complete = self._sink.received_pages == len(self._transfer.run)
        except TransferCancelled:
            log.info("a pull was abandoned", arrived=self._sink.received_pages)
        except (PageCorrupt, QuireError) as error:
            log.warning(
                "a pull ended early",
                arrived=self._sink.received_pages,
                wanted=len(self._transfer.run),
                error=str(error),
            )
        finally:
            self._sink.flush()
            self._sink.close()
        return self._sink.received_pages

    def close(self) -> None:
        """Close the connections. This happens after the engine has learned the result of `run`, since the engine need
        not wait for it. After a complete pull, the connection to the peer's data port or socket goes to the
        ConnectionPool, which keeps some connections of this host and closes others."""
        if self._complete and (left := self._link.release_connection()) is not None:
            self._connection_pool.put_connection(*left)
        for transport in self._transports:
            transport.close()

    def _fetch_with_retries(self) -> None:
        """Try all transports, in rounds, until all pages have landed. Return with pages missing after
        MAX_FRUITLESS_ROUNDS rounds in a row that brought no page, after a round in which the peer was silent, or when
        the pull is cancelled. As long as no page has come, an export or a gRPC server that may not be there yet is
        waited for, for about EXPORT_WAIT_S: an export from the peer's first refusal on, a server from the start on.
        Otherwise raises NotFound if the peer refuses; PageCorrupt, TransferCancelled and other QuireErrors pass
        through."""
        first_told_s: float | None = None
        began_s, fruitless = time.monotonic(), 0
        while fruitless < MAX_FRUITLESS_ROUNDS and not self.is_cancelled:
            before = self._sink.received_pages
            try:
                if self._try_all_transports():
                    return
            except NotFound as error:
                # From the first answer on: a process that has just begun may keep who comes in waiting for longer.
                first_told_s = first_told_s or time.monotonic()
                early = time.monotonic() - first_told_s < EXPORT_WAIT_S
                if error.code != "EXPORT_UNKNOWN" or self._sink.received_pages or not early:
                    raise
                for link in self._links:
                    link.close()
                self._cancelled.wait(RETRY_S)
                continue
            if not self._sink.received_pages and self._may_be_early and time.monotonic() - began_s < EXPORT_WAIT_S:
                self._cancelled.wait(CONNECT_RETRY_S)
                continue
            fruitless = fruitless + 1 if self._sink.received_pages == before else 0

    def _try_all_transports(self) -> bool:
        """Try the transports in turn; returns True if there is nothing more to try: all pages have come, or the peer
        was silent towards one of them."""
        self._met_silence = False
        used = self._fallback.try_in_turn(self._transports, self._transfer.access.route, self._fetch)
        return used is not None or self._met_silence

    def _fetch(self, transport: FetchTransport[PeerAccess]) -> None:
        """Fetch what is missing by one transport. If any page came, note that transport as the one used last. Raises
        TransportError, after the unfilled slot was given back and a silent peer was noted. The next gRPC call then
        waits for a server only if this error was silence."""
        before = self._sink.received_pages
        try:
            transport.fetch(self._transfer, self._sink)
        except TransportError as error:
            self._sink.close()  # others may have the slot meanwhile
            self._tunnel.expect_server(starting=error.silent)
            self._met_silence = self._met_silence or error.silent
            raise
        finally:
            if self._sink.received_pages > before:
                self.last_used = transport.name

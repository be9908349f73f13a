"""KV connectors: the sources and destinations of pages. They run in the KV transfer agent's process and see pages only
as bytes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

from quire_common.channel import sync_channel
from quire_common.errors import QuireError, Unsupported
from quire_common.identity.callers import KVSTORE
from quire_common.kv.kv_client import KvClient, LeaseAccess
from quire_common.pages import PageCorrupt, PageRun
from quire_common.sequence import context_to_pb
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.transports.transport import PageTransfer
from quire_worker.kv_transfer.transports.transport_selector import TransportSelector

if TYPE_CHECKING:
    from quire_common.credit import PageMove
    from quire_common.kv.page_mac import PageMac
    from quire_worker.kv_transfer.setup import AgentSetup
    from quire_worker.kv_transfer.transports.transport import PageSink, PageSource

log = get_logger(__name__)
# A load begins with this small call. A request waits for the load, so a kvstore that hangs must be found out soon.
ATTACH_S = 2.0


class KvConnector(Protocol):
    """One load and one store run at once, each on a thread of its own. Each must end within its own time limit, even if
    the other side hangs. PageSink and PageSource raise TransferCancelled if the move was cancelled; a connector lets it
    pass."""

    @property
    def transport(self) -> str:
        """The registry name of the transport by which a load, a store or a probe last succeeded; empty if none has."""

    def store(self, move: PageMove, page_source: PageSource) -> int:
        """Store the move's pages; `page_source.request_pages` asks for those that must be sent. Returns how many pages,
        from the first on, the store has now. May raise QuireError."""

    def load(self, move: PageMove, sink: PageSink) -> int:
        """Bring the move's pages into the sink, in order. A page is accepted only if it matches its key. Returns how
        many pages came before the first that did not. May raise QuireError."""


class KvStoreConnector:
    """A connector to a kvstore. Control calls go over gRPC; the transports carry the pages."""

    def __init__(
        self,
        client: KvClient,
        transports: TransportSelector,
        namespace: bytes,
        dtype: str,
        page_bytes: int,
        mac: PageMac | None = None,
    ) -> None:
        self._client = client
        self._transports = transports
        self._namespace = namespace
        self._dtype = dtype
        self._page_bytes = page_bytes
        self._mac = mac

    @classmethod
    def connect(cls, setup: AgentSetup, mac: PageMac | None) -> KvStoreConnector:
        """Return a connector with a channel of its own to the kvstore. A background thread finds out which transports
        work."""
        client = KvClient(sync_channel(setup.kvstore, setup.service_config(), KVSTORE))
        transports = TransportSelector.from_name(setup.kv_transport, setup.kvstore, client)
        transports.probe_in_background()
        return cls(client, transports, bytes.fromhex(setup.namespace), setup.dtype, setup.page_bytes, mac)

    @property
    def transport(self) -> str:
        return self._transports.last_used

    def store(self, move: PageMove, page_source: PageSource) -> int:
        """Send the pages that the store lacks; returns how many, from the first on, it is known to have now. Pages that
        had no room, or that the store refused at the commit, are tried in a further round, until a round stores none.
        There are at most as many rounds as pages. Raises the QuireErrors of the store and the transports."""
        run, context = PageRun(self._namespace, move.group, move.hashes), context_to_pb(move.context)
        first = 0
        for _ in move.hashes:
            begun = self._client.begin_put(run, self._page_bytes, context=context)
            admitted = len(run) if begun.admitted is None else begun.admitted
            if not begun.wanted:
                return admitted
            with self._client.committing(begun, context) as outcome:
                page_source.request_pages(begun.wanted)
                self._transports.send(
                    PageTransfer(run, self._dtype, self._page_bytes, begun.access, move.context, self._mac), page_source
                )
            first = begun.wanted[0]
            if not outcome[0].stored:
                break
            if admitted == len(run) and outcome[0].stored == outcome[0].wanted:
                return admitted
        return first

    def load(self, move: PageMove, sink: PageSink) -> int:
        """Fetch the move's pages, the first of its lease, into the sink; returns how many came. A QuireError or a
        damaged page ends the load early and is logged, not raised; other exceptions, such as TransferCancelled, are
        raised."""
        run = PageRun(self._namespace, move.group, move.hashes)
        try:
            access = self._access(move)
            self._transports.fetch(
                PageTransfer(run, self._dtype, self._page_bytes, access, move.context, self._mac), sink
            )
        except (PageCorrupt, QuireError) as error:
            log.warning("a load ended early", arrived=sink.received_pages, wanted=len(run), error=str(error))
        return sink.received_pages

    def _access(self, move: PageMove) -> LeaseAccess:
        """Ask the store how the pages of the move's lease can be reached (in at most ATTACH_S). Returns only the
        lease's name if no transport needs more, or if the store is too old to say. Raises the store's other
        QuireErrors."""
        if self._transports.direct:
            with contextlib.suppress(Unsupported):  # a kvstore of before
                return self._client.attach(move.lease, context_to_pb(move.context), ATTACH_S)
        return LeaseAccess(move.lease)

"""Gives sequences the KV routes that their clients ask for. A client may ask to keep the KV pages of a prompt (an
export). A later request may name the engine and the transfer that have these pages (a pull).

The router looks up the named engine among those that discovery names, and asks this engine for the ticket. The router
never connects to an address from a client; it only compares this address with the one from discovery. If the pages
cannot be pulled, the engine computes them, and the request does not fail.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import grpc

from quire_common.cancellation import is_cancelled
from quire_common.errors import InvalidArgument, QuireError
from quire_common.telemetry.logs import get_logger
from quire_router import metrics
from quire_router.kv_transfer.export import Export
from quire_router.kv_transfer.given_ticket import GivenTicket
from quire_router.sequences.kv_route import host_and_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.ticket import Ticket
    from quire_router.kv_transfer.migrator import Migrator
    from quire_router.kv_transfer.transfers import Transfers
    from quire_router.sequences.job import KvSource
    from quire_router.sequences.kv_route import TransferSource
    from quire_router.sequences.sequence_state import SequenceState

log = get_logger(__name__)


class TicketSource(Protocol):
    """An engine that discovery names."""

    @property
    def address(self) -> str:
        """The address by which discovery names the replica."""

    @property
    def session(self) -> TransferSource:
        """The stream to its scheduler."""

    async def ticket(self, transfer_id: bytes, timeout_s: float) -> Ticket:
        """Return the ticket of a transfer that is open at the engine. Raises grpc.RpcError if the call fails, and
        InvalidArgument for a ticket that cannot be read."""


class TicketManager:
    """Begins KV routes. One per process; all methods run in the event loop. `find_engine` finds an engine by its
    instance. `lease_s` is the time for which pages are kept for a client. `timeout_s` bounds the call for a ticket."""

    def __init__(
        self,
        find_engine: Callable[[str], TicketSource | None],
        transfers: Transfers,
        migrator: Migrator,
        lease_s: float,
        timeout_s: float,
    ) -> None:
        self._find_engine = find_engine
        self._transfers = transfers
        self._migrator = migrator
        self._lease_ms = round(lease_s * 1000)
        self._timeout_s = timeout_s

    async def begin_route(self, sequence: SequenceState) -> None:
        """Give the sequence the KV route that its job asks for. For an export, the engine keeps the pages for the
        client. For a pull, fetch the ticket of the transfer that the client names, and count the outcome; if that
        fails, the reason is logged, and the engine computes the pages. Otherwise do nothing.

        Call before the sequence is submitted. Siblings share the pages that this sequence pulls.
        """
        job = sequence.job
        if job.kv_export:
            sequence.kv.begin_route(Export(sequence, self._migrator, self._lease_ms))
        elif job.kv_source is not None:
            outcome = await self._route_pull(sequence, job.kv_source)
            metrics.client_transfers.labels(outcome).inc()
            if outcome != "used":
                log.info("pages cannot be had", request_id=sequence.context.request_id, reason=outcome)

    async def _route_pull(self, sequence: SequenceState, source: KvSource) -> str:
        """Ask the engine that the client names for the ticket of the transfer, and give the sequence a route with this
        ticket. A host or port that the client gives must be that of discovery. The lease of the transfer is renewed
        from then on.

        Returns a label for metrics: `used`, or why there is no route: `unknown_engine`, `other_address`,
        `unknown_transfer`, `no_answer` (also if the engine leaves discovery meanwhile) or `bad_ticket`. Cancelling the
        call raises CancelledError as usual.
        """
        engine = self._find_engine(source.engine)
        if engine is None:
            return "unknown_engine"
        host, port = host_and_port(engine.address)
        if source.host not in (None, host) or source.port not in (None, port):
            return "other_address"
        try:
            ticket = await self._ticket(engine, source.transfer_id)
        except grpc.aio.AioRpcError as error:
            return "unknown_transfer" if error.code() is grpc.StatusCode.NOT_FOUND else "no_answer"
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return "no_answer"  # the engine left discovery, and its channel is closed
        except QuireError:
            return "bad_ticket"
        transfer = self._transfers.add(ticket, engine.session, of_session=False)
        sequence.kv.begin_route(GivenTicket(transfer))
        return "used"

    async def _ticket(self, engine: TicketSource, transfer_id: bytes) -> Ticket:
        """Fetch the ticket from the engine. Raises InvalidArgument if the ticket cannot be read or belongs to another
        transfer, and grpc.RpcError if the call fails."""
        ticket = await engine.ticket(transfer_id, self._timeout_s)
        if ticket.transfer_id != transfer_id:
            raise InvalidArgument("OTHER_TICKET", "The ticket belongs to another transfer.", "Report it.")
        return ticket

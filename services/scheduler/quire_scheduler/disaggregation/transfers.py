"""Transfers: pages of this replica that other engines may pull, the tickets by which they pull them, and the leases for
which the pages are kept.

A transfer begins when its request starts, and ends once: the other engine has pulled all pages, the transfer was
released, its lease ended, or it failed: its pages will never be complete, could not be sent, or are needed here.
Meanwhile its pages are lent to export moves, by which the worker serves them. When the transfer ends, its exports are
cancelled, and the pages can be used again once the worker has reported these. If the request loses its slot and starts
again, its pages are exported anew under the same ticket.

This module knows sessions only by their numbers.
"""

from __future__ import annotations

import enum
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_common.credit import MoveKind
from quire_common.errors import require
from quire_common.sequence import page_extras
from quire_common.ticket import Ticket, tail_handle
from quire_scheduler.core.request import State
from quire_scheduler.kv.page_identity import identify
from quire_scheduler.kv.page_moves import Move

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_common.credit import WorkerHello
    from quire_scheduler.core.request import Request
    from quire_scheduler.core.stats import Stats
    from quire_scheduler.kv.page_moves import MoveEnd, PageMoves

_ID_BYTES, _KEY_BYTES = 16, 32
# The longest lease without renewal that a client may ask for.
_MOST_LEASE_S = 600.0


class End(enum.Enum):
    """The ways in which a transfer ends."""

    PULLED = "pulled"
    RELEASED = "released"
    EXPIRED = "expired"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer that has not ended. A `detached` one, whose lease a client asked for, does not end with its
    session."""

    ticket: Ticket
    session: int
    lease_s: float
    detached: bool
    # The request, until it has sampled its token; then None.
    request: Request | None
    expires_s: float = 0.0
    # `exports`: ids of the moves that export the pages. `tables`: the pages by KV group. `suspended`: the exports were
    # cancelled, since the request lost its slot.
    exports: set[int] = field(default_factory=set)
    tables: tuple[list[int], ...] = ()
    suspended: bool = False


class Transfers:
    """All transfers of one core that have not ended."""

    def __init__(self, moves: PageMoves, stats: Stats, hello: WorkerHello, instance: str, lease_s: float) -> None:
        self._moves = moves
        self._stats = stats
        self._hello = hello
        self._instance = instance
        self._lease_s = lease_s
        self._open: dict[bytes, Transfer] = {}
        # Open transfers by the uid of their request, while it computes, and by the id of each export.
        self._computing: dict[int, Transfer] = {}
        self._by_export: dict[int, Transfer] = {}
        self._next_expiry_s = 0.0
        moves.owners[MoveKind.EXPORT] = self._exported

    def __len__(self) -> int:
        return len(self._open)

    def begin_transfer(self, request: Request, now: float) -> Ticket | None:
        """Export the pages of a prefill-only request that starts: under a new ticket at its first start, under the same
        one later. Returns the ticket, or None if the worker serves no pages or the transfer is over. If an earlier
        export has not ended yet, the transfer fails, and the result is None too."""
        transfer = self._computing.get(request.uid)
        if transfer is None:
            if request.admitted or not self._hello.data_address:
                return None
            transfer = self._add(request)
        elif transfer.exports:
            self._end(transfer, End.FAILED)
            return None
        ticket, transfer.suspended = transfer.ticket, False
        transfer.tables = tuple(table[: ticket.pages] for table in request.tables)
        for group, table in enumerate(transfer.tables):
            move = Move(MoveKind.EXPORT, group, table, ticket.handles, ticket=ticket)
            export = self._moves.begin_move(move, request.context, now)
            transfer.exports.add(export)
            self._by_export[export] = transfer
        return ticket

    def prefilled(self, request: Request, now: float) -> None:
        """Note that the request has sampled its token and is about to leave. Its pages stay, and the lease of its
        transfer begins now. A request without a transfer is ignored."""
        if transfer := self._computing.pop(request.uid, None):
            transfer.request = None
            transfer.expires_s = now + transfer.lease_s
            self._next_expiry_s = min(self._next_expiry_s, transfer.expires_s)

    def finished(self, request: Request, now: float) -> None:
        """Handle a request that finished with its first token, so that no replica will decode it. Its transfer is
        released, unless a client asked for a lease on the pages: then the lease begins. Any other request is
        ignored."""
        if transfer := self._computing.get(request.uid):
            if transfer.detached:
                self.prefilled(request, now)
            else:
                self._end(transfer, End.RELEASED)

    def suspend_transfer(self, request: Request) -> None:
        """Cancel the exports of a request that loses its slot and pages and will start again."""
        if transfer := self._computing.get(request.uid):
            transfer.suspended = True
            self._moves.cancel_moves(transfer.exports)

    def abandon_transfer(self, request: Request) -> None:
        """End, as failed, the transfer of a request that leaves before its pages are filled; nothing happens if it has
        none."""
        if transfer := self._computing.get(request.uid):
            self._end(transfer, End.FAILED)

    def find_ticket(self, transfer_id: bytes) -> Ticket | None:
        """Return the ticket of an open transfer; None if no such transfer is open."""
        transfer = self._open.get(transfer_id)
        return None if transfer is None else transfer.ticket

    def renew_leases(self, transfer_ids: Iterable[bytes], now: float) -> None:
        """Renew the leases of these transfers, which an engine still waits to pull: each lasts for its whole time from
        now. Unknown ids are ignored."""
        for transfer_id in transfer_ids:
            if transfer := self._open.get(transfer_id):
                transfer.expires_s = max(transfer.expires_s, now + transfer.lease_s)

    def release_transfers(self, transfer_ids: Iterable[bytes]) -> None:
        """End these transfers, which nobody will pull any more, as released. Unknown ids are ignored."""
        for transfer_id in transfer_ids:
            if transfer := self._open.get(transfer_id):
                self._end(transfer, End.RELEASED)

    def end_session(self, session: int) -> None:
        """End the session's transfers except the detached ones, since nobody renews their leases any more."""
        for transfer in [t for t in self._open.values() if t.session == session and not t.detached]:
            self._end(transfer, End.RELEASED)

    def finished_prefills(self) -> list[Transfer]:
        """Return the transfers whose request has left, the earliest first."""
        return [transfer for transfer in self._open.values() if transfer.request is None]

    def newest_prefill(self) -> Transfer | None:
        """Return the latest transfer whose request has left; None if there is none."""
        return next((transfer for transfer in reversed(self._open.values()) if transfer.request is None), None)

    def reclaim_pages(self, transfer: Transfer) -> None:
        """End a transfer, as failed, because its pages are needed here."""
        self._end(transfer, End.FAILED)

    def expire_leases(self, now: float) -> None:
        """End, as expired, the transfers whose lease is over; those whose request still computes have no lease yet."""
        if now < self._next_expiry_s:
            return
        waiting = self.finished_prefills()
        for transfer in waiting:
            if transfer.expires_s <= now:
                self._end(transfer, End.EXPIRED)
        self._next_expiry_s = min((t.expires_s for t in waiting if t.expires_s > now), default=float("inf"))

    def end_all(self) -> None:
        """End all transfers as failed, since the replica stops, has lost its worker or takes a role without them."""
        for transfer in list(self._open.values()):
            self._end(transfer, End.FAILED)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every transfer has exports, or is suspended because its request will start again
        and be exported anew. Each export must be in flight, and the records by request and by export must agree with
        the open transfers."""
        exports = {export for transfer in self._open.values() for export in transfer.exports}
        require(exports == self._by_export.keys(), "an export is of no transfer")
        flying = {move_id for move_id, move in self._moves.items() if move.kind is MoveKind.EXPORT}
        require(exports <= flying, "an export has ended and is waited for")
        computing = {transfer.request.uid: transfer for transfer in self._open.values() if transfer.request}
        require(computing == self._computing, "a transfer lost its request")
        for transfer in self._open.values():
            started = transfer.request is None or transfer.request.state is State.STARTED
            require(started != transfer.suspended and (bool(transfer.exports) or not started), "nothing is exported")

    def _add(self, request: Request) -> Transfer:
        """Open a transfer for the request, with a new ticket and the lease that the request asks for (at most 600 s),
        or else the default. A transfer whose lease was asked for does not end with its session."""
        asked_s = min(request.transfer.lease_ms / 1000, _MOST_LEASE_S)
        lease_s = asked_s or self._lease_s
        ticket = self._ticket(request, lease_s)
        transfer = Transfer(ticket, request.session, lease_s, asked_s > 0, request)
        self._open[ticket.transfer_id] = self._computing[request.uid] = transfer
        return transfer

    def _ticket(self, request: Request, lease_s: float) -> Ticket:
        """Make a ticket, with a new id and key, for the pages of the request's known tokens. It has the names of the
        full pages, the name of the last page if that is not full, the page layout, the worker's epoch, host and
        addresses, and the lease. The request's full pages get their hashes if they had none."""
        geometry, known = self._hello.model.pages, request.known_len
        identify(request, geometry.page_size)
        whole = known // geometry.page_size
        hashes, first = tuple(request.hashes[:whole]), whole * geometry.page_size
        tail, parent = request.ids(first, known), hashes[-1] if hashes else b""
        return Ticket(
            transfer_id=secrets.token_bytes(_ID_BYTES),
            instance=self._instance,
            epoch=self._hello.epoch,
            page_hashes=hashes,
            tail_handle=tail_handle(tail, page_extras(request.sequence), parent, first) if len(tail) else b"",
            tail_tokens=len(tail),
            lease_key=secrets.token_bytes(_KEY_BYTES),
            sources=self._hello.data_address,
            geometry=geometry,
            lease_ms=round(lease_s * 1000),
            host=self._hello.host,
        )

    def _exported(self, move: Move, moved: MoveEnd, now: float) -> None:
        """Handle the end of an export. If it failed, the transfer fails; if it was the last one, the transfer counts as
        pulled. A suspended transfer stays open."""
        transfer = self._by_export.pop(moved.id, None)
        if transfer is None:
            return
        transfer.exports.discard(moved.id)
        if transfer.suspended:
            return
        if moved.failed:
            self._end(transfer, End.FAILED)
        elif not transfer.exports:
            self._end(transfer, End.PULLED)

    def _end(self, transfer: Transfer, end: End) -> None:
        """Remove the transfer, have the next Grant cancel its exports, and count how it ended. Its pages can be used
        again when the worker has reported these exports."""
        del self._open[transfer.ticket.transfer_id]
        if transfer.request is not None:
            del self._computing[transfer.request.uid]
        for export in transfer.exports:
            del self._by_export[export]
        self._moves.cancel_moves(transfer.exports)
        self._stats.transfers[end.value] = self._stats.transfers.get(end.value, 0) + 1

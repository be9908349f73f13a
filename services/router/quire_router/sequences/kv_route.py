"""How a sequence's KV pages travel between engines, where they do: what its Submit says of it, and what comes of that.

Knows no streams: see kv_transfer/handoff.py for the way that most such sequences go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.errors import QuireError
    from quire_common.ticket import KvTransfer, Ticket
    from quire_router.sequences.delta import HopTiming


@dataclass(frozen=True, slots=True)
class PulledPages:
    """What a decode side got of a ticket's pages. `error`: why not all, None where it has all. `instance`: who."""

    pages: int
    wanted: int
    us: int
    error: QuireError | None
    instance: str = ""


@dataclass(frozen=True, slots=True)
class KvOffer:
    """What a client needs to have pages that are kept for it: which engine has them, where discovery says that it is,
    and what of."""

    engine: str
    host: str
    port: int
    transfer_id: bytes
    pages: int
    tokens: int
    ranks: int


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address of discovery's; port 0 where it has none."""
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() else (address, 0)


class TransferSource(Protocol):
    """The session with a prefill side's scheduler. `life`: grows each time that the session begins anew."""

    instance: str
    address: str
    life: int

    def release_transfer(self, transfer_id: bytes) -> None:
        """Let the scheduler take the transfer's pages back."""

    def renew_transfers(self, transfer_ids: Sequence[bytes]) -> None:
        """Prolong the leases of these transfers."""


class KvRoute(Protocol):
    """A sequence has one where pages of it are to travel. All methods are called in the event loop."""

    def kv_transfer(self, holder: object) -> KvTransfer | None:
        """Return the KV transfer for the Submit to this holder; None where no pages are transferred."""

    def ticket_came(self, ticket: Ticket, source: TransferSource) -> None:
        """The prefill side has begun; `ticket` is the means to pull its pages."""

    def prefill_ended(self, timings: Sequence[HopTiming]) -> None:
        """The prefill side has done its part, and has dropped the sequence."""

    def pages_pulled(self, found: PulledPages) -> None:
        """The engine that has the sequence needs the ticket no more. `found`: the pages that it has got."""

    def row_came(self, finish: int, now_ns: int) -> None:
        """A row of the sequence has come. `finish` is the finish reason of its last row, else 0."""

    def take_over(self) -> str:
        """Move a sequence that has no engine any more to a place that is kept for it. Returns that engine's instance;
        '' where there is no such place."""

    def timings(self) -> Sequence[HopTiming]:
        """Return the timings of the transfer so far."""

    def close(self) -> None:
        """The sequence has ended, or nobody wants it any more. Idempotent."""

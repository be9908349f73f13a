"""The interface of a KV route. A KV route is the object that has a sequence's KV pages transferred between engines: it
provides the ticket for the Submit, and is called when something happens to the transfer.

This module knows no streams. Most routes are a Handoff; see kv_transfer/handoff.py.
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
    """The result of a pull: the decode side `instance` got `pages` of the `wanted` pages in `us` microseconds. `error`
    says why pages are missing; None: no error."""

    pages: int
    wanted: int
    us: int
    error: QuireError | None
    instance: str = ""


@dataclass(frozen=True, slots=True)
class KvOffer:
    """The data with which a client can have kept pages pulled: the engine that has them, its address from discovery,
    the transfer, and the numbers of its pages, tokens and ranks."""

    engine: str
    host: str
    port: int
    transfer_id: bytes
    pages: int
    tokens: int
    ranks: int


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address from discovery into host and port; the port is 0 if the address has none."""
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() else (address, 0)


class TransferSource(Protocol):
    """The session with the scheduler of a prefill side. `life` grows by one each time a stream of the session ends."""

    instance: str
    address: str
    life: int

    def release_transfer(self, transfer_id: bytes) -> None:
        """Let the scheduler take the transfer's pages back."""

    def renew_transfers(self, transfer_ids: Sequence[bytes]) -> None:
        """Prolong the leases of these transfers."""


class KvRoute(Protocol):
    """The transfer of one sequence's pages. A sequence without transfers has no route. All methods are called in the
    event loop."""

    def kv_transfer(self, holder: object) -> KvTransfer | None:
        """Return the KV transfer for the Submit to this holder; None if no pages are transferred."""

    def ticket_came(self, ticket: Ticket, source: TransferSource) -> None:
        """The prefill side has begun; a decode side can pull the pages with `ticket`."""

    def prefill_ended(self, timings: Sequence[HopTiming]) -> None:
        """The prefill side has computed the prompt, and has dropped the sequence. `timings` are its phases."""

    def pages_pulled(self, found: PulledPages) -> None:
        """The pull of the engine that has the sequence has ended. `found` is its result; the engine does not need the
        ticket any more."""

    def row_came(self, finish: int, now_ns: int) -> None:
        """A row of the sequence has come. `finish` is the finish reason in the last row, and 0 in other rows."""

    def take_over(self) -> str:
        """Move a sequence that has no engine any more to its reservation. Returns the instance of the engine with the
        reservation; '' if there is none."""

    def timings(self) -> Sequence[HopTiming]:
        """Return the timings of the transfer so far."""

    def close(self) -> None:
        """The sequence has ended, or nobody wants it any more. Idempotent."""

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
    """Of discovery's address; port 0 where it has none."""
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() else (address, 0)


class KvRoute(Protocol):
    """A choice has one where pages of it are to travel. All methods are called in the event loop."""

    def kv_transfer(self, holder: object) -> KvTransfer | None:
        """What the Submit to this holder says of pages; None: nothing."""

    def admitted(self, ticket: Ticket) -> None:
        """The prefill side has begun; this is how to have its pages."""

    def prefilled(self, timings: Sequence[HopTiming]) -> None:
        """The prefill side has done its part, and has let go of the choice."""

    def pulled(self, found: PulledPages) -> None:
        """The engine that has the choice needs the ticket no more."""

    def received(self, finish: int, now_ns: int) -> None:
        """A row of the choice has come; `finish` as in Choice.received."""

    def take_over(self) -> str:
        """The choice has no engine any more: the instance at which it now goes on, since a place was kept there for it;
        '': nowhere."""

    def timings(self) -> Sequence[HopTiming]:
        """Of the way so far."""

    def close(self) -> None:
        """The choice has ended, or nobody wants it any more. Idempotent."""

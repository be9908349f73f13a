"""What a router asks of a request's pages where prefill and decode are apart. Knows nothing of how it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from quire_common.errors import QuireError
    from quire_common.ticket import Ticket


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """The domain form of quire.v1.KvTransfer. `refusal`: there was a ticket, which is of no use."""

    prefill_only: bool = False
    ticket: Ticket | None = None
    await_handover: bool = False
    lease_ms: int = 0
    refusal: QuireError | None = None

    def check(self) -> None:
        """Raise InvalidArgument where one request should be both sides."""
        if self.prefill_only and (self.ticket or self.refusal or self.await_handover):
            raise InvalidArgument(
                "BAD_TRANSFER",
                "The request is to be prefilled here alone, and to take over what another side prefilled.",
                "Submit it to each side with what that side does.",
                param="transfer",
            )


NO_TRANSFER = KvTransfer()
PREFILL_ONLY = KvTransfer(prefill_only=True)


@dataclass(frozen=True, slots=True)
class Handover:
    """The domain form of quire.v1.Handover. `refusal`: there was a ticket, which is of no use."""

    ticket: Ticket | None = None
    tokens: tuple[int, ...] = ()
    give_up: bool = False
    refusal: QuireError | None = None

"""What a router asks of a request's pages where prefill and decode are apart. Knows nothing of how it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.ticket import KvTransfer

if TYPE_CHECKING:
    from quire_common.errors import QuireError
    from quire_common.ticket import Ticket


NO_TRANSFER = KvTransfer()
PREFILL_ONLY = KvTransfer(prefill_only=True)


@dataclass(frozen=True, slots=True)
class Handover:
    """The domain form of quire.v1.Handover. `refusal`: there was a ticket, which is of no use."""

    ticket: Ticket | None = None
    tokens: tuple[int, ...] = ()
    give_up: bool = False
    refusal: QuireError | None = None

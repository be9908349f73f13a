"""The router's instructions for a request that is prefilled at one replica and decoded at another. This module does not
know how they are carried out."""

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
    """The domain form of quire.v1.Handover. `refusal`: the message had a ticket that cannot be used, and this is
    why."""

    ticket: Ticket | None = None
    tokens: tuple[int, ...] = ()
    give_up: bool = False
    refusal: QuireError | None = None

"""Protocols of the handlers in an agent process. One handler brings pages into the ring, the other takes pages out of
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from quire_common.kv.page_mac import PageMac
    from quire_worker.kv_transfer.job_queue import Job, Send
    from quire_worker.kv_transfer.ring import Ring
    from quire_worker.kv_transfer.setup import AgentSetup
    from quire_worker.kv_transfer.transports.nixl_agent import SharedNixlAgent


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The arguments of all handlers. `listeners` are sockets that the engine has bound and that outlive the process.
    `silence_s` returns the seconds since the engine's last frame; the engine sends a frame at least twice a second."""

    setup: AgentSetup
    ring: Ring
    send: Send
    listeners: tuple[int, ...]
    silence_s: Callable[[], float]
    mac: PageMac | None = None
    """Of pages that come and go over a network."""
    nixl: SharedNixlAgent | None = None
    """Of peers that exchange pages by NIXL."""


class TransferHandler(Protocol):
    """All methods are called from the process's main thread and return at once."""

    def start_job(self, job: Job) -> None:
        """Carry the job out, without blocking the caller. At its end, send ENDED. A cancelled job may end without it;
        if ENDED comes all the same, the engine ignores it."""

    def cancel_before(self, generation: int) -> None:
        """Cancel all jobs of earlier generations."""

    def cancel_job(self, number: int) -> None:
        """Cancel this job; does nothing if the handler does not have it."""

    def close(self) -> None:
        """Cancel all jobs."""


class LoadHandler(TransferHandler, Protocol):
    """Brings pages into the ring, and announces them by ARRIVED."""

    def return_slots(self, slots: Sequence[int]) -> None:
        """Free these slots: the engine has taken their pages."""


class StoreHandler(TransferHandler, Protocol):
    """Takes pages out of the ring: asks for them by WANTED, and returns their slots by RELEASED."""

    def filled(self, generation: int, number: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Take pages of a job that the engine has put into the ring, as (index, slot)."""


class DirectHandler(Protocol):
    """Handles pages that go from pool to pool without a ring. Sends FETCH and KEPT."""

    def offered(self, number: int, pages: int) -> None:
        """Note that the first `pages` pages of an export are filled."""

    def fetched(self, number: int, pages: int) -> None:
        """Note that `pages` more pages of a pull are in the pool; a negative number means that they cannot be
        fetched."""


class TransferHandlers(NamedTuple):
    """The handlers of one agent process. Only an agent process for peers has `direct`."""

    load_handler: LoadHandler
    store_handler: StoreHandler
    direct_handler: DirectHandler | None = None


MakeHandlers = Callable[[AgentContext], TransferHandlers]

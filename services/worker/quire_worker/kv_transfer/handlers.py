"""The handlers that an agent process is made of. One brings pages into the ring, the other takes them out."""

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
    """The arguments of all handlers. `listeners` are descriptors that the engine bound, which outlive the process;
    `silence_s` says for how long nothing has come from the engine, which gives signs of life twice a second."""

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
        """Carry the job out, on another thread, and send ENDED at its end, unless it was cancelled."""

    def cancel_before(self, generation: int) -> None:
        """Cancel all jobs of earlier generations."""

    def cancel_job(self, number: int) -> None:
        """Cancel this job, if it is here."""

    def close(self) -> None:
        """Cancel all jobs."""


class LoadHandler(TransferHandler, Protocol):
    """Sends ARRIVED."""

    def return_slots(self, slots: Sequence[int]) -> None:
        """Free these slots: the engine has taken their pages."""


class StoreHandler(TransferHandler, Protocol):
    """Sends WANTED and RELEASED."""

    def filled(self, generation: int, number: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Take pages of a job that the engine has put into the ring, as (index, slot)."""


class DirectHandler(Protocol):
    """For pages that go from pool to pool without a ring. Sends FETCH and KEPT."""

    def offered(self, number: int, pages: int) -> None:
        """Note that the first `pages` pages of an export are filled."""

    def fetched(self, number: int, pages: int) -> None:
        """Note that so many more pages of a pull are in the pool; negative: they cannot be fetched."""


class TransferHandlers(NamedTuple):
    """`direct` is of peers alone."""

    load_handler: LoadHandler
    store_handler: StoreHandler
    direct_handler: DirectHandler | None = None


MakeHandlers = Callable[[AgentContext], TransferHandlers]

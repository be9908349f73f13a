"""Transport: carries the pages of one move between the ring and a kvstore, or from another worker. registry.py lists
all transports.

In both directions, a transport can continue where another has failed: a PageSink knows the pages that have come, and a
PageSource knows those that remain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.kv.kv_client import KvClient, LeaseAccess
    from quire_common.kv.page_mac import PageMac
    from quire_common.pages import PageRun
    from quire_common.sequence import RequestContext

A_co = TypeVar("A_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)


class TransportError(Exception):  # the next transport's turn, not an error of the other side's
    """A transport is not available, or has failed during a transfer. `silent`: the other side may be there, but sent
    nothing. `unreached`: nobody has ever answered at this address, perhaps because of the network."""

    def __init__(self, text: str, *, silent: bool = False, unreached: bool = False) -> None:
        super().__init__(text)
        self.silent = silent
        self.unreached = unreached


@dataclass(frozen=True, slots=True)
class StoreEnd:
    """The parts from which a kvstore's transports are made: its address, and a client for calls to it."""

    kvstore: str
    client: KvClient


@dataclass(frozen=True)
class PageTransfer(Generic[A_co]):
    """The pages of a move, and the access that its lease gives to them."""

    run: PageRun
    dtype: str
    page_bytes: int
    access: A_co
    context: RequestContext
    mac: PageMac | None = None
    """For transports that leave the host: they send pages with their MACs, and refuse pages without."""


class PageSink(Protocol):
    """A load's way into the ring, page by page."""

    @property
    def received_pages(self) -> int:
        """Number of pages that have come, from the first on; also the index of the next page."""

    def next_buffer(self) -> memoryview:
        """Memory for the body of the next page; the same until that page is committed. May wait; raises
        TransferCancelled."""

    def commit_page(self) -> None:
        """Hand on the next page, which fills the buffer and was checked against its key."""

    def flush(self) -> None:
        """Announce the pages committed so far, since the next one may be long in coming."""


class PageSource(Protocol):
    """A store's way out of the ring, page by page."""

    @property
    def remaining(self) -> Sequence[int]:
        """The indices of wanted pages that were not yet released, in order."""

    @property
    def fd(self) -> int:
        """Descriptor of the shared memory that bodies lie in."""

    def request_pages(self, indices: Sequence[int]) -> None:
        """Ask for these pages, which will be sent in this order."""

    def is_ready(self, index: int) -> bool:
        """Whether `page_body` would return without waiting. A caller that holds no page may always ask for the next
        one. A caller that holds pages must check first: the ring is small, and the wait could be for its own pages."""

    def page_body(self, index: int) -> memoryview:
        """A page's body, good until the page is released; waits for it. Raises TransferCancelled if the move is
        cancelled."""

    def page_offset(self, index: int) -> int:
        """Offset of a page's body in the file of `fd`."""

    def release_page(self, index: int) -> None:
        """Release a page's body, which is not needed any more."""


class FetchTransport(Protocol[A_contra]):
    """A transport that brings pages. `fetch` is called by one thread, and raises TransportError, QuireError where the
    other side itself refuses, and PageCorrupt where a page is not what its key says."""

    name: str

    def offered(self, access: A_contra) -> bool:
        """Whether this access allows the transport."""

    def fetch(self, transfer: PageTransfer[A_contra], sink: PageSink) -> None:
        """Fetch all remaining pages into the sink, in order."""

    def close(self) -> None:
        """Close connections and maps."""


class Transport(FetchTransport["LeaseAccess"], Protocol):
    """A kvstore's transport. `fetch` reports a damaged page to the store where that is of use. `send` is called by one
    thread, and raises as `fetch` does."""

    needs_attach: bool
    """Whether it needs what the store tells of a lease, beside the lease's name."""

    def probe(self, access: LeaseAccess) -> None:
        """Raise TransportError unless the transport is open from here."""

    def send(self, transfer: PageTransfer[LeaseAccess], page_source: PageSource) -> None:
        """Send all remaining pages to the store."""

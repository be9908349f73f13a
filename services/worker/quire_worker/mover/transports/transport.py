"""What a transport is: pages of one move between the ring and a kvstore, by one way.

Both directions can go on where another transport broke off: a Landing knows how far it has come, a Shipment what is
left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.kv_client import DataAccess
    from quire_common.pages import PageRun
    from quire_common.sequence import RequestContext

# The fastest first, which is the order of choice.
TRANSPORTS = ("shm", "tcp", "grpc")


class TransportDown(Exception):  # the next transport's turn, not an error of the store's
    """This way is closed, or has broken down under way."""


@dataclass(frozen=True)
class Cargo:
    """The pages of a move, and the access that its lease gives to them."""

    run: PageRun
    dtype: str
    page_bytes: int
    access: DataAccess
    context: RequestContext


class Landing(Protocol):
    """A load's way into the ring, page by page."""

    @property
    def landed(self) -> int:
        """How many pages have landed, from the first on; the index of the next."""

    def room(self) -> memoryview:
        """Where the body of the next page goes; the same until it has landed. May wait; raises Abandoned."""

    def land(self) -> None:
        """The next page is in its room, and is what its key says."""


class Shipment(Protocol):
    """A store's way out of the ring, page by page."""

    @property
    def left(self) -> Sequence[int]:
        """Indices that are wanted and not gone, in order."""

    @property
    def fd(self) -> int:
        """Descriptor of the shared memory that bodies lie in."""

    def want(self, indices: Sequence[int]) -> None:
        """These are to be sent, in this order."""

    def ready(self, index: int) -> bool:
        """Whether `body` would not wait. Who holds no page back may always ask for the next; others might wait for
        themselves, since the ring is small."""

    def body(self, index: int) -> memoryview:
        """A page's body, good until it is gone; raises Abandoned."""

    def place(self, index: int) -> int:
        """Where in the file that body lies."""

    def gone(self, index: int) -> None:
        """Nobody needs the body any more."""


class Transport(Protocol):
    """`fetch` and `send` are called by one thread each. Both raise TransportDown, and QuireError where the store itself
    refuses; `fetch` raises PageCorrupt where a page is not what its key says, and has the store look at it where that
    is of use."""

    name: str

    def offered(self, access: DataAccess) -> bool:
        """Whether the store says that there is this way."""

    def probe(self, access: DataAccess) -> None:
        """Whether it is open from here; raises TransportDown."""

    def fetch(self, cargo: Cargo, landing: Landing) -> None:
        """All pages from the next one on."""

    def send(self, cargo: Cargo, shipment: Shipment) -> None:
        """All pages that are left."""

    def close(self) -> None:
        """Let go of connections and maps."""

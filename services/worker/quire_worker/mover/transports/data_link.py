"""DataLink: a data connection to the store, made when it is needed and kept for the next move. One thread at a time."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, NoReturn

from quire_common.errors import NotFound
from quire_common.kv_data.connection import DataConnection
from quire_common.kv_data.frame import DataBroken, Head, Kind
from quire_common.kv_data.lease_key import handle_of
from quire_common.pages import PageCorrupt
from quire_worker.mover.transports.transport import TransportDown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quire_common.kv_client import DataAccess
    from quire_common.kv_data.connection import Arrived
    from quire_common.kv_data.seal import Seals

    Address = tuple[str, int] | str

CONNECT_S = 2.0
FRAME_S = 5.0


class Exchange:
    """What is said on a connection under one lease. Raises DataBroken."""

    def __init__(self, connection: DataConnection, lease_key: bytes) -> None:
        self.connection = connection
        self.seals: Seals = connection.client_seals(lease_key)
        self._handle = handle_of(lease_key)

    def send(
        self,
        kind: Kind,
        payload: memoryview | bytes = b"",
        *,
        page: int = 0,
        offset: int = 0,
        last: bool = False,
        page_header: bytes = bytes(128),
        fds: Sequence[int] = (),
    ) -> None:
        """One frame."""
        head = Head(kind, self._handle, page, offset, len(payload), last, page_header)
        self.connection.send(head, self.seals, payload, fds)

    def arrived(self, *kinds: Kind) -> Arrived:
        """The next head, genuine and of one of these kinds; raises NotFound where the store refuses."""
        arrived = self.connection.receive()
        if arrived is None:
            raise DataBroken("ended", "the store has ended the connection")
        try:
            head = self.connection.admit(arrived, self.seals)
            if head.kind is Kind.REFUSED:
                self._refused(arrived)
            if head.kind not in kinds:
                raise DataBroken("garbage", f"{head.kind.name} is no answer to this")
        except BaseException:
            arrived.close_fds()
            raise
        return arrived

    def _refused(self, arrived: Arrived) -> NoReturn:
        code = bytearray(arrived.head.length)
        if code:
            self.connection.receive_payload(arrived, self.seals, memoryview(code))
        raise NotFound(code.decode("ascii", "replace"), "The kvstore refuses on a data connection.", "It is a miss.")


class DataLink:
    """To one address at a time."""

    def __init__(self) -> None:
        self._connection: DataConnection | None = None
        self._address: Address = ""

    @contextlib.contextmanager
    def exchange(self, address: Address, access: DataAccess) -> Iterator[Exchange]:
        """Raises TransportDown where the connection cannot be had or breaks. Whatever is raised within ends it, but for
        refusals and wrong pages: who knows that more is to come after these closes it."""
        try:
            yield Exchange(self._connected(address), access.key)
        except (NotFound, PageCorrupt):
            raise
        except (DataBroken, OSError) as error:
            self.close()
            raise TransportDown(str(error)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.shut()  # who waits for its end on another thread notices
            connection.close()

    def _connected(self, address: Address) -> DataConnection:
        if self._connection is not None:
            # Between moves nothing is to come: what is there is the store's end.
            if address == self._address and not self._connection.wait(0):
                return self._connection
            self.close()
        self._connection, self._address = connect(address), address
        return self._connection


def connect(address: Address) -> DataConnection:
    """A new connection, greeted; raises DataBroken, OSError. A string is the name of an abstract Unix socket."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        sock = socket.create_connection(address, CONNECT_S)
    try:
        if isinstance(address, str):
            sock.settimeout(CONNECT_S)
            sock.connect("\0" + address)
        connection = DataConnection(sock, FRAME_S)
        connection.enter()
    except BaseException:
        sock.close()
        raise
    return connection

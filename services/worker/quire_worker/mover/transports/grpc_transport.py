"""The portable way: Put and Get streams on the channel that everything else is said on. It is always there."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from quire_common.errors import QuireError
from quire_common.pages import PageCorrupt, check_page
from quire_common.sequence import context_to_pb

if TYPE_CHECKING:
    from quire_common.kv_client import KvClient, LeaseAccess
    from quire_worker.mover.transports.transport import Cargo, Landing, Shipment


class GrpcTransport:
    """See Transport."""

    name = "grpc"

    def __init__(self, client: KvClient) -> None:
        self._client = client

    def offered(self, access: LeaseAccess) -> bool:
        """See Transport."""
        return True

    def probe(self, access: LeaseAccess) -> None:
        """See Transport: the access came this way."""

    def fetch(self, cargo: Cargo[LeaseAccess], landing: Landing) -> None:
        """See Transport. The store checks each page before it sends it; one of many frames may go bad behind that."""
        try:
            self._receive(cargo, landing)
        except PageCorrupt:
            with contextlib.suppress(QuireError):  # a kvstore of before, or away: the page is a miss all the same
                self._client.check(cargo.access.lease, landing.landed, context_to_pb(cargo.context))
            raise

    def send(self, cargo: Cargo[LeaseAccess], shipment: Shipment) -> None:
        """See Transport."""
        sent: list[int] = []

        def body(index: int) -> memoryview:
            while sent:
                shipment.gone(sent.pop())
            sent.append(index)
            return shipment.body(index)

        indices = list(shipment.left)
        if indices:
            self._client.send_pages(
                cargo.access.lease, cargo.run, cargo.dtype, indices, body, context=context_to_pb(cargo.context)
            )
            shipment.gone(sent.pop())

    def close(self) -> None:
        """See Transport: the channel is another's."""

    def _receive(self, cargo: Cargo[LeaseAccess], landing: Landing) -> None:
        indices = range(landing.landed, len(cargo.run))
        pages = self._client.get_pages(cargo.access.lease, indices, context=context_to_pb(cargo.context))
        with contextlib.closing(pages):
            for index, framed in pages:
                if index != landing.landed:
                    raise PageCorrupt(f"page {index} came in the place of {landing.landed}")
                body = check_page(framed, cargo.run.key(index), cargo.dtype, cargo.page_bytes)
                landing.room()[:] = body
                landing.land()

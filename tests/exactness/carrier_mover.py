"""A mover in virtual time whose pages go by the worker's own carrier, to and from a TieredStore: what the carrier takes
for good is written, the rest is rubbish."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from quire_common.errors import QuireError
from quire_common.kv_client import KvClient, LeaseAccess, TransferCancelled
from quire_worker.mover.carrier import KvStoreCarrier
from quire_worker.mover.transports.grpc_transport import GrpcTransport
from quire_worker.mover.transports.transport_choice import TransportChoice
from tests.exactness.virtual_mover import VirtualMover

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from quire_common.credit import ModelInfo, PageMove
    from quire_worker.engine.ports import PageBytes
    from tests.exactness.tiered_store import TieredStore
    from tests.exactness.virtual_time import VirtualTime


class CarrierMover(VirtualMover):
    """Implements VirtualMover."""

    def __init__(
        self, time: VirtualTime, rng: np.random.Generator, pages: PageBytes, store: TieredStore, info: ModelInfo
    ) -> None:
        super().__init__(time, rng, pages, store)
        client, group = cast(KvClient, store), info.pages.groups[0]
        data_endpoints = TransportChoice([GrpcTransport(client)], lambda: LeaseAccess(b""), clock=lambda: time.now_s)
        self._carrier = KvStoreCarrier(client, data_endpoints, info.pages.namespace, group.dtype, pages.page_bytes)

    def _load(self, move: PageMove, most: int) -> int:
        numbers, landing = move.device_page.tolist(), _Landing(self._pages, move, most)
        try:
            self._carrier.load(move, landing)
        except (TransferCancelled, QuireError):
            assert landing.landed < len(numbers), "a load was whole and failed"
        for page in numbers[landing.landed :]:
            self._rubbish(page)
        return landing.landed

    def _put(self, move: PageMove, most: int) -> int:
        try:
            return self._carrier.store(move, _Shipment(self._pages, move, most))
        except (TransferCancelled, QuireError):
            return 0


class _Landing:
    """Implements Landing. Given up after `most` pages."""

    def __init__(self, pages: PageBytes, move: PageMove, most: int) -> None:
        self.landed = 0
        self._pages = pages
        self._numbers = move.device_page.tolist()
        self._most = most
        self._room = bytearray(pages.page_bytes)

    def room(self) -> memoryview:
        if self.landed >= self._most:
            raise TransferCancelled
        return memoryview(self._room)

    def land(self) -> None:
        self._pages.write_page(self._numbers[self.landed], bytes(self._room))
        self.landed += 1

    def tell(self) -> None:
        """Nobody waits for single pages."""


class _Shipment:
    """Implements Shipment. Given up before page `most`."""

    fd = -1

    def __init__(self, pages: PageBytes, move: PageMove, most: int) -> None:
        self.left: list[int] = []
        self._pages = pages
        self._numbers = move.device_page.tolist()
        self._most = most

    def want(self, indices: Sequence[int]) -> None:
        self.left = list(indices)

    def ready(self, index: int) -> bool:
        return True

    def body(self, index: int) -> memoryview:
        if index >= self._most:
            raise TransferCancelled
        return memoryview(self._pages.read_page(self._numbers[index])).cast("B")

    def place(self, index: int) -> int:
        raise NotImplementedError("bodies lie in no file")

    def gone(self, index: int) -> None:
        self.left.remove(index)

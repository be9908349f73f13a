"""A KV transfer agent in virtual time whose pages go by the worker's own carrier, to and from a TieredStore: what the
carrier takes for good is written, the rest is rubbish."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from quire_common.errors import QuireError
from quire_common.kv.kv_client import KvClient, LeaseAccess, TransferCancelled
from quire_worker.kv_transfer.kv_connector import KvStoreConnector
from quire_worker.kv_transfer.transports.grpc_transport import GrpcTransport
from quire_worker.kv_transfer.transports.transport_selector import TransportSelector
from tests.exactness.virtual.virtual_agent import VirtualTransferAgent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from quire_common.credit import ModelInfo, PageMove
    from quire_worker.engine.ports import PageBytes
    from tests.exactness.virtual.tiered_store import TieredStore
    from tests.exactness.virtual.virtual_time import VirtualTime


class ConnectorAgent(VirtualTransferAgent):
    """Implements VirtualMover."""

    def __init__(
        self, time: VirtualTime, rng: np.random.Generator, pages: PageBytes, store: TieredStore, info: ModelInfo
    ) -> None:
        super().__init__(time, rng, pages, store)
        client, group = cast(KvClient, store), info.pages.groups[0]
        data_endpoints = TransportSelector([GrpcTransport(client)], lambda: LeaseAccess(b""), clock=lambda: time.now_s)
        self._connector = KvStoreConnector(client, data_endpoints, info.pages.namespace, group.dtype, pages.page_bytes)

    def _load(self, move: PageMove, most: int) -> int:
        numbers, sink = move.device_page.tolist(), _PageSink(self._pages, move, most)
        try:
            self._connector.load(move, sink)
        except (TransferCancelled, QuireError):
            assert sink.received_pages < len(numbers), "a load was whole and failed"
        for page in numbers[sink.received_pages :]:
            self._rubbish(page)
        return sink.received_pages

    def _put(self, move: PageMove, most: int) -> int:
        try:
            return self._connector.store(move, _PageSource(self._pages, move, most))
        except (TransferCancelled, QuireError):
            return 0


class _PageSink:
    """Implements PageSink. Given up after `most` pages."""

    def __init__(self, pages: PageBytes, move: PageMove, most: int) -> None:
        self.received_pages = 0
        self._pages = pages
        self._numbers = move.device_page.tolist()
        self._most = most
        self._room = bytearray(pages.page_bytes)

    def next_buffer(self) -> memoryview:
        if self.received_pages >= self._most:
            raise TransferCancelled
        return memoryview(self._room)

    def commit_page(self) -> None:
        self._pages.write_page(self._numbers[self.received_pages], bytes(self._room))
        self.received_pages += 1

    def flush(self) -> None:
        """Does nothing: no caller waits for single pages."""


class _PageSource:
    """Implements PageSource. Given up before page `most`."""

    fd = -1

    def __init__(self, pages: PageBytes, move: PageMove, most: int) -> None:
        self.remaining: list[int] = []
        self._pages = pages
        self._numbers = move.device_page.tolist()
        self._most = most

    def request_pages(self, indices: Sequence[int]) -> None:
        self.remaining = list(indices)

    def is_ready(self, index: int) -> bool:
        return True

    def page_body(self, index: int) -> memoryview:
        if index >= self._most:
            raise TransferCancelled
        return memoryview(self._pages.read_page(self._numbers[index])).cast("B")

    def page_offset(self, index: int) -> int:
        raise NotImplementedError("bodies lie in no file")

    def release_page(self, index: int) -> None:
        self.remaining.remove(index)

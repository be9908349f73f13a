"""A KV transfer agent's end without a KV transfer agent: carriers over one transport or the automatic choice, with a
ring of their own."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

import grpc

from bench.harness.plain_pages import PlainPageSink, PlainPageSource, ids
from quire_common.credit import MoveKind, PageMove
from quire_common.kv.kv_client import KvClient
from quire_worker.kv_transfer.kv_connector import KvStoreConnector
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.transports.transport_selector import TransportSelector
from tests.unit.kvstore.pages import body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire_common.kv.page_mac import PageMac
    from quire_common.pages import PageRun

PAGE_BYTES = 64 << 10
FAST = ("shm", "tcp")
EACH = ("shm", "tcp", "grpc")


class AgentSide:
    """Slots 0.. of the ring are for stores, the second half for loads."""

    def __init__(
        self, address: str, client: KvClient, choice: str, pages: int, page_bytes: int, mac: PageMac | None = None
    ) -> None:
        self.client = client
        self.page_bytes = page_bytes
        self.transports = TransportSelector.from_name(choice, address, client)
        self.connector = KvStoreConnector(client, self.transports, b"n" * 32, "uint8", page_bytes, mac)
        self.ring = Ring.create(page_bytes, 2 * pages)
        self._pages = pages

    def store(self, run: PageRun, on_body: Callable[[int], None] = lambda index: None) -> int:
        self.connector._namespace = run.namespace
        for index in range(len(run)):
            self.ring.slot(index)[:] = body(run, index, self.page_bytes)
        move = PageMove(1, MoveKind.STORE, run.group, ids(*range(len(run))), run.hashes)
        return self.connector.store(move, PlainPageSource(self.ring, on_body))

    def look_up(self, run: PageRun, lease_ms: int = 60_000) -> bytes:
        found = self.client.lookup(run, lease_ms=lease_ms)
        assert found.pages == len(run)
        return found.lease

    def load(self, run: PageRun, lease: bytes, on_land: Callable[[int], None] = lambda index: None) -> int:
        """How many pages came; each is compared."""
        self.connector._namespace = run.namespace
        for index in range(len(run)):
            self.ring.slot(self._pages + index)[:] = bytes(self.page_bytes)
        sink = PlainPageSink(self.ring, on_land, first_slot=self._pages)
        move = PageMove(2, MoveKind.LOAD, run.group, ids(*range(len(run))), run.hashes, lease)
        came = self.connector.load(move, sink)
        assert sink.bodies() == [body(run, index, self.page_bytes) for index in range(came)], "never wrong bytes"
        return came

    def close(self) -> None:
        self.transports.close()
        gc.collect()  # an TransferCancelled that has passed through a generator holds the page in a cycle
        self.ring.close()


@contextlib.contextmanager
def agent_side(
    address: str, choice: str, pages: int = 8, page_bytes: int = PAGE_BYTES, mac: PageMac | None = None
) -> Iterator[AgentSide]:
    with grpc.insecure_channel(address) as channel:
        side = AgentSide(address, KvClient(channel, timeout_s=60), choice, pages, page_bytes, mac)
        try:
            yield side
        finally:
            side.close()

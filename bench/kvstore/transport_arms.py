"""Page moves of a worker's KV transfer agent with a kvstore process, by each transport, as arms of the kvstore's
benchmark.

Pages lie in the KV transfer agent's ring before they are put, and are checked in the ring after they are read. The
engine's copies between pool and ring are the same for all transports, and not counted. The calls begin, lookup, attach,
commit and release over gRPC are counted. The kvstore's memory is resident, as is that of all raw arms.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import numpy as np

from bench.harness.plain_pages import PlainPageSink, PlainPageSource, ids
from bench.kvstore.pages import NAMESPACE
from bench.kvstore.tier_arms import LIMIT_S
from quire_common.credit import MoveKind, PageMove
from quire_common.kv.kv_client import KvClient
from quire_worker.kv_transfer.kv_connector import KvStoreConnector
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.transports.transport_selector import TransportSelector

if TYPE_CHECKING:
    from bench.kvstore.pages import Pages
    from quire_common.kv.page_mac import PageMac

# Pages of one move: a prompt of 4,096 tokens where a page has 64, as on a GPU.
PART = 64


class RingMemcpy:
    """The raw arm for shared memory: copies each page from the ring to resident memory, and back to the ring."""

    def __init__(self, pages: Pages) -> None:
        count, size = len(pages.framed), pages.page_bytes
        self._ring = mmap.mmap(-1, count * size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._block = mmap.mmap(-1, count * size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._in_ring = np.frombuffer(self._ring, np.uint8).reshape(count, size)
        self._in_block = np.frombuffer(self._block, np.uint8).reshape(count, size)

    def put(self, pages: Pages) -> float:
        self._in_ring[:] = pages.bodies
        begin = time.perf_counter()
        for index in range(len(pages.framed)):
            np.copyto(self._in_block[index], self._in_ring[index])
        return time.perf_counter() - begin

    def get(self, pages: Pages) -> float:
        begin = time.perf_counter()
        for index in range(len(pages.framed)):
            np.copyto(self._in_ring[index], self._in_block[index])
        return time.perf_counter() - begin

    def close(self) -> None:
        del self._in_ring, self._in_block
        self._ring.close()
        self._block.close()


class TransportArm:
    """Runs one move after another, through a ring that holds the pages of a round."""

    def __init__(self, address: str, transport: str, pages: Pages, mac: PageMac | None = None) -> None:
        self._channel = grpc.insecure_channel(address)
        self._client = KvClient(self._channel, LIMIT_S)
        self._transports = TransportSelector.from_name(transport, address, self._client)
        self._connector = KvStoreConnector(self._client, self._transports, NAMESPACE, "uint8", pages.page_bytes, mac)
        self._count = len(pages.framed)
        self._ring = Ring.create(pages.page_bytes, 2 * self._count)

    def put(self, pages: Pages) -> float:
        for index, body in enumerate(pages.bodies):
            self._ring.slot(index)[:] = body.data
        begin = time.perf_counter()
        for part in pages.parts(PART):
            hashes = pages.run.hashes[part.start : part.stop]
            move = PageMove(0, MoveKind.STORE, 0, ids(*part), hashes)
            if self._connector.store(move, PlainPageSource(self._ring, first_slot=part.start)) != len(part):
                raise SystemExit("the kvstore does not keep its pages")
        return time.perf_counter() - begin

    def get(self, pages: Pages) -> float:
        took_s = 0.0
        for part in pages.parts(PART):
            first = self._count + part.start
            begin = time.perf_counter()
            run = replace(pages.run, hashes=pages.run.hashes[part.start : part.stop])
            lease = self._client.lookup(run).lease
            move = PageMove(0, MoveKind.LOAD, 0, ids(*part), run.hashes, lease)
            landed = self._connector.load(move, PlainPageSink(self._ring, first_slot=first))
            self._client.release(lease)
            took_s += time.perf_counter() - begin
            if landed != len(part) or self._ring.slot(first) != pages.bodies[part.start].data:
                raise SystemExit("pages came back changed, or not all")
        return took_s

    def close(self) -> None:
        self._transports.close()
        self._ring.close()
        self._channel.close()

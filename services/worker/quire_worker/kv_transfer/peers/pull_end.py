"""PullEnd: the parts from which the transports of one pull are made. PoolPageSink: takes the pages of a pull that go
past the ring, since the engine's device fetches them from the peer's memory.

No sequence may read a fetched page before it is kept. Only then it is certain that the lease still held when the page
was read.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire_common.kv.kv_client import TransferCancelled
from quire_worker.kv_transfer.transports.transport import TransportError
from quire_worker.kv_transfer.wire import AgentFrameKind
from quire_worker.side_process.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.arrays import Int32
    from quire_worker.kv_transfer.job_queue import Job, Send
    from quire_worker.kv_transfer.kvstore_queues import RingPageSink
    from quire_worker.kv_transfer.transports.data_link import DataLink
    from quire_worker.kv_transfer.transports.nixl_agent import SharedNixlAgent
    from quire_worker.kv_transfer.transports.shared_map import SharedMapCache


@dataclass(frozen=True, slots=True)
class PullEnd:
    """The parts of one pull. `link` leads to the peer's data port or socket, `tunnel_link` to its gRPC server."""

    link: DataLink
    tunnel_link: DataLink
    maps: SharedMapCache
    pool_sink: PoolPageSink
    nixl: SharedNixlAgent | None
    """Of peers that exchange pages by NIXL."""


class PoolPageSink:
    """The pull's thread calls `fetch`, `keep`, `keep_last` and `drop`; any thread may call `fetched` and `look`. `sink`
    counts the pages of all transports."""

    def __init__(self, job: Job, sink: RingPageSink, send: Send, is_cancelled: Callable[[], bool]) -> None:
        self._job = job
        self._sink = sink
        self._send = send
        self._is_cancelled = is_cancelled
        self._changed = threading.Condition()
        self._answer: int | None = None
        self._fetched = 0

    @property
    def reached(self) -> int:
        """The index of the next page to be fetched."""
        return self._sink.received_pages + self._fetched

    def fetch(self, places: Int32) -> None:
        """Have the engine, by a FETCH frame, copy the next pages of the pull from the pages `places` of the peer's
        memory, and wait for its answer, without a time limit. They count as received only after `keep` or `keep_last`.
        Raises TransferCancelled if the pull is cancelled, and TransportError if the engine has not copied all of
        them."""
        wanted = np.concatenate((np.array([self.reached], np.int32), places))
        with self._changed:
            self._answer = None
            self._send(Frame.of(AgentFrameKind.FETCH, self._job.generation, self._job.number, wanted))
            self._changed.wait_for(lambda: self._is_cancelled() or self._answer is not None)
            if self._is_cancelled():
                raise TransferCancelled
            if self._answer != len(places):
                raise TransportError("the engine cannot read the peer's memory")
            self._fetched += len(places)

    def keep(self) -> None:
        """Count the fetched pages as received and, if there are any, tell the engine by KEPT that the lease held until
        after the last fetch."""
        self._sink.skip_pages(self._fetched)
        self._send_kept(self._fetched)

    def keep_last(self) -> None:
        """Count the fetched pages as received, without telling the engine: the frame that ends the pull says so."""
        self._sink.skip_pages(self._fetched)
        self._fetched = 0

    def drop(self) -> None:
        """Drop the pages that were fetched and not kept, and tell the engine, if there are any."""
        self._send_kept(0)

    def _send_kept(self, kept: int) -> None:
        """If pages were fetched and are neither kept nor dropped, tell the engine that `kept` of them count, by KEPT,
        and forget them here."""
        if self._fetched:
            self._fetched = 0
            self._send(Frame.of(AgentFrameKind.KEPT, self._job.generation, self._job.number, [kept]))

    def fetched(self, pages: int) -> None:
        """Pass the engine's answer, how many pages it has copied, to `fetch`, which waits for it."""
        with self._changed:
            self._answer = pages
            self._changed.notify_all()

    def look(self) -> None:
        """Wake `fetch`, so that it notices that the pull was cancelled."""
        with self._changed:
            self._changed.notify_all()

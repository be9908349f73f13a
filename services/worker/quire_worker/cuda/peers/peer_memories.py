"""PeerMemories: page pools of other workers, kept open here while pages are read from them.

The driver does not free a worker's pool while another process has it open, even after the worker's end. The restarted
worker would then lack that memory. So a pool that was unused for a while is closed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from quire_common.errors import QuireError
from quire_common.telemetry.logs import get_logger
from quire_worker.cuda.peers.driver import cuda_driver
from quire_worker.cuda.peers.ipc_memory import IpcMemory
from quire_worker.cuda.peers.peer_memory import PeerMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire_worker.cuda.peers.driver import CudaDriver

log = get_logger(__name__)
IDLE_S = 2.0


class PeerMemories:
    """The open page pools, by descriptor. `drain` waits until the device reads none of them. Used by the model thread
    and by the one that calls `close_idle`."""

    def __init__(
        self,
        page_bytes: int,
        drain: Callable[[], None],
        driver: Callable[[], CudaDriver] = cuda_driver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page_bytes = page_bytes
        self._drain = drain
        self._driver = driver
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[bytes, PeerMemory] = {}
        self._used_s: dict[bytes, float] = {}

    @contextlib.contextmanager
    def using(self, descriptor: bytes) -> Iterator[PeerMemory]:
        """Yield the memory that the descriptor names, which is opened at its first use. Reads are enqueued inside,
        where no other thread can close or open a memory. Raises InvalidArgument for a bad descriptor, Unavailable if
        the driver cannot open the memory."""
        with self._lock:
            if descriptor not in self._open:
                self._open[descriptor] = PeerMemory(IpcMemory.unpack(descriptor), self._page_bytes, self._driver())
            self._used_s[descriptor] = self._clock()
            yield self._open[descriptor]

    def close_idle(self, idle_s: float = IDLE_S) -> None:
        """Close the memories that were not used for `idle_s`, after waiting for reads that are enqueued. An error of
        the driver at a close is logged; an error of the wait, which is the GPU's, passes on."""
        with self._lock:
            since = self._clock() - idle_s
            idle = [descriptor for descriptor, used_s in self._used_s.items() if used_s <= since]
            if idle:
                self._drain()
            for descriptor in idle:
                del self._used_s[descriptor]
                try:
                    self._open.pop(descriptor).close()
                except QuireError as error:  # of the driver's; there is nothing else to be done with it
                    log.warning("another worker's memory could not be closed", cause=error.message)

    def close(self) -> None:
        """Close all memories."""
        self.close_idle(0.0)

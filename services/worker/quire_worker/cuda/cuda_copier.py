"""CudaCopier: copies pages between the device and the KV transfer agent's ring, on a stream of its own, beside the
steps.

The ring is registered with the driver once, so copies need no intermediate buffer. A thread waits for the ends of
copies.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire_common.telemetry.logs import get_logger
from quire_worker.cuda.peers.peer_memories import IDLE_S, PeerMemories
from quire_worker.engine.device import CLOSE_LIMIT_S, poll_until
from quire_worker.engine.spec import STEP_TIMEOUT_S
from quire_worker.ops.triton.gather_pages import compile_gather, gather_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.arrays import Int32
    from quire_worker.cuda.cuda_pages import CudaPages
    from quire_worker.kv_transfer.ring import Ring

log = get_logger(__name__)


class CudaCopier:
    """Implements Copier. No step has to be waited for: a page that is stored was reported whole, and a page that is
    loaded gets its readers after its ticket has passed. If the ring cannot be registered, that is logged, and copies
    are slow. A wait for copies raises DEVICE_HUNG after `step_timeout_s` seconds; in `close`, after CLOSE_LIMIT_S."""

    def __init__(self, pages: CudaPages, ring: Ring, step_timeout_s: float = STEP_TIMEOUT_S) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._pages = pages
        self._ring = ring
        memory = np.frombuffer(ring.memory, np.uint8)
        self._address = int(memory.ctypes.data)
        self._memory = torch.from_numpy(memory)
        self._driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        status = int(self._driver.cudaHostRegister(self._address, memory.nbytes, 0))
        self._registered = status == 0
        if not self._registered:
            log.warning(
                "the transfer agent's ring could not be pinned: pages move slowly", bytes=memory.nbytes, status=status
            )
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        self._step_timeout_s = step_timeout_s
        self._peers = PeerMemories(pages.page_bytes, self._await_copies)
        self._marked = 0
        self._passed = 0
        self._events: queue.SimpleQueue[tuple[int, torch.cuda.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="copies", daemon=True)
        self._thread.start()

    def to_ring(self, page: int, slot: int) -> None:
        """Enqueue a copy of a page of the pool into a ring slot."""
        with torch.cuda.stream(self._stream):
            self._slot(slot).copy_(self._pages.bytes_of(page), non_blocking=True)

    def to_page(self, page: int, slot: int) -> None:
        """Enqueue a copy of a ring slot into a page of the pool."""
        with torch.cuda.stream(self._stream):
            self._pages.writable(page).copy_(self._slot(slot), non_blocking=True)

    def prepare_fetch(self) -> None:
        with torch.cuda.stream(self._stream):
            compile_gather(self._pages.rows)

    def fetch(self, memory: bytes, source: Int32, target: Int32) -> None:
        """Enqueue a copy of pages `source` of another worker's memory, which the descriptor names and which is opened
        at need, into pages `target`. The peer's pages are whole. Raises Unavailable if the memory cannot be opened from
        here. Raises InvalidArgument for a bad descriptor, for page 0, and for pages that do not exist."""
        self._pages.check_writable(target)
        with self._peers.using(memory) as peer, torch.cuda.stream(self._stream):
            peer.check(source)
            gather_pages(peer.address, self._pages.rows, source, target)

    def record_event(self) -> int:
        """Enqueue an event behind all copies begun so far, and return its ticket. If no event can be made, log the
        error and wait here for the copies. Raises DEVICE_HUNG if they take too long, and an error of the GPU."""
        self._marked += 1
        try:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            event.record(self._stream)
        except RuntimeError:  # the driver has none left: then it is waited for here; a GPU that is broken says so again
            log.exception("the end of copies could not be marked")
            self.drain()
            return self._marked
        self._events.put((self._marked, event))
        return self._marked

    def is_complete(self, ticket: int) -> bool:
        return ticket <= self._passed

    def drain(self) -> None:
        """Wait for all copies. Raises DEVICE_HUNG if they take too long, and an error of the GPU."""
        self._await_copies()
        self._passed = self._marked

    def close(self) -> None:
        """End the thread, wait for all copies, close peers' memory and release the ring. Waits CLOSE_LIMIT_S at most
        for the thread, and as long for the copies. An error of the GPU in a copy, or DEVICE_HUNG, is raised before
        memory and ring are released."""
        self._events.put(None)
        self._thread.join(CLOSE_LIMIT_S)
        poll_until(self._stream.query, CLOSE_LIMIT_S)
        self._peers.close()
        del self._memory
        if self._registered:
            self._driver.cudaHostUnregister(self._address)

    def _await_copies(self) -> None:
        poll_until(self._stream.query, self._step_timeout_s)

    def _slot(self, slot: int) -> torch.Tensor:
        start = self._ring.offset_of(slot)
        return self._memory[start : start + self._ring.page_bytes]

    def _main(self) -> None:
        """Wait for each event, on the copier's thread, mark its ticket as complete and call `wake`; close peers' memory
        that is idle. Ends at `close`, or at an error of CUDA; later tickets then stay incomplete. Such an error is
        logged if it comes from an event, and passes on if it comes before peers' memory is closed."""
        while True:
            self._peers.close_idle()
            try:
                item = self._events.get(timeout=IDLE_S)
            except queue.Empty:
                continue
            if item is None:
                return
            ticket, event = item
            try:
                event.synchronize()
            except Exception:
                # An error of CUDA stays with the process; the device finds it too, and ends the worker.
                log.exception("copies of pages failed")
                return
            self._passed = max(self._passed, ticket)
            self.wake()

"""WatchedCopier records when a pull's pages were requested, enqueued and complete. HostStandIn is a device for machines
without a GPU; its copies take a given time and copy nothing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.disaggregation.transfer_arms import NoCopier
from quire_worker.arrays import Int32
from quire_worker.kv_transfer.copier import Copier
from quire_worker.kv_transfer.ring import Ring


@dataclass
class Watch:
    """The times of one pull, on the clock `time.perf_counter()`."""

    began: float = field(default_factory=time.perf_counter)
    asked: float = 0.0
    launches: int = 0
    pages: int = 0
    launch_s: float = 0.0
    seen: float = 0.0
    """When the last copies were seen to have ended."""
    wakes: int = 0
    """How often the engine was woken: once for each group of frames, and for each end of copies."""

    def parts_ms(self, ended: float) -> dict[str, float]:
        """Return the parts of the time of a pull, in milliseconds: until the engine was asked for pages, enqueuing the
        copies, running all copies (on the host's clock), and the messages until the move is over."""
        if not self.launches:
            return {}
        copies_s = self.seen - self.asked - self.launch_s
        parts = {"asked": self.asked - self.began, "launching": self.launch_s, "copies": copies_s}
        parts["afterwards"] = ended - self.seen
        return {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in parts.items()}


class WatchedCopier:
    """Implements Copier by another copier, and records its times."""

    def __init__(self, inner: Copier) -> None:
        self.watch = Watch()
        self._inner = inner
        self._wake: Callable[[], None] = lambda: None

    @property
    def wake(self) -> Callable[[], None]:
        return self._wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        def woken() -> None:
            self.watch.seen = time.perf_counter()
            wake()

        self._wake, self._inner.wake = wake, woken

    def to_ring(self, page: int, slot: int) -> None:
        self._inner.to_ring(page, slot)

    def to_page(self, page: int, slot: int) -> None:
        self._inner.to_page(page, slot)

    def prepare_fetch(self) -> None:
        self._inner.prepare_fetch()

    def fetch(self, memory: bytes, source: Int32, target: Int32) -> None:
        began, watch = time.perf_counter(), self.watch
        watch.asked = watch.asked or began
        self._inner.fetch(memory, source, target)
        watch.launches += 1
        watch.pages += len(source)
        watch.launch_s += time.perf_counter() - began

    def record_event(self) -> int:
        return self._inner.record_event()

    def is_complete(self, ticket: int) -> bool:
        return self._inner.is_complete(ticket)

    def drain(self) -> None:
        self._inner.drain()

    def close(self) -> None:
        self._inner.close()


class HostStandIn(NoCopier):
    """Implements Copier. `page_s`: the seconds of a page."""

    def __init__(self, page_s: float, ring: Ring) -> None:
        super().__init__(ring, bytes(ring.page_bytes))
        self._page_s = page_s
        self._changed = threading.Condition()
        self._under_way: deque[tuple[int, float]] = deque()
        self._free_at = 0.0
        self._marked = self._passed = 0
        threading.Thread(target=self._main, daemon=True).start()

    def fetch(self, memory: bytes, source: Int32, target: Int32) -> None:
        self._free_at = max(time.perf_counter(), self._free_at) + len(source) * self._page_s

    def record_event(self) -> int:
        self._marked += 1
        with self._changed:
            self._under_way.append((self._marked, self._free_at))
            self._changed.notify()
        return self._marked

    def is_complete(self, ticket: int) -> bool:
        return ticket <= self._passed

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way)
                ticket, at = self._under_way.popleft()
            time.sleep(max(0.0, at - time.perf_counter()))
            self._passed = ticket
            self.wake()

"""PeerMemory: another worker's page pool, opened by this process. Pages go by number and are bounds-checked here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument
from quire_worker.ops.triton.gather_pages import ALIGNED

if TYPE_CHECKING:
    from quire_worker.arrays import Int32
    from quire_worker.cuda.peers.driver import CudaDriver
    from quire_worker.cuda.peers.ipc_memory import IpcMemory


class PeerMemory:
    """Raises Unavailable where the memory cannot be opened from the current device, InvalidArgument where the
    descriptor's bytes are not whole pages within the allocation, or are not aligned as `gather_pages` needs them."""

    def __init__(self, memory: IpcMemory, page_bytes: int, driver: CudaDriver) -> None:
        self._driver = driver
        self._base = driver.open(memory.handle)
        self.address = self._base + memory.offset
        """Where page 0 lies."""
        self.num_pages = memory.size // page_bytes
        try:
            base, size = driver.allocation_of(self._base)
        except BaseException:
            self.close()
            raise
        if self.address + memory.size > base + size or memory.size % page_bytes or self.address % ALIGNED:
            self.close()
            raise InvalidArgument(
                "BAD_DESCRIPTOR",
                f"{memory.size} bytes from {memory.offset} on are no pool of pages in an allocation of {size}, "
                f"aligned to {ALIGNED} bytes.",
                "Run prefill and decode replicas of one release, with one model.",
            )

    def check(self, pages: Int32) -> None:
        """Raise InvalidArgument if one of these page numbers, which come from the other worker, is 0 or not a page of
        its pool."""
        if len(pages) and not 0 < int(pages.min()) <= int(pages.max()) < self.num_pages:
            raise InvalidArgument(
                "BAD_PAGE",
                f"Pages {int(pages.min())} to {int(pages.max())} are not all among the other worker's 1 to "
                f"{self.num_pages - 1}.",
                "Report it with the logs of both workers.",
            )

    def close(self) -> None:
        """Unmap the memory; whatever reads it must have ended. Idempotent."""
        base, self._base = self._base, 0
        if base:
            self._driver.close(base)

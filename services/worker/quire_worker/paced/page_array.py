"""PageArray: the KV pages of the paced worker, 8 bytes per position, in one array. Page 0 is the dummy page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from quire_worker.arrays import UInt64

BYTES_PER_TOKEN = 8


class PageArray:
    """Pages as two views of one array. `states` has an item for each place in the pool, page * page_size + offset, for
    the runner. Page moves read and write pages as bytes. Raises ConfigError for fewer than two pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ConfigError(
                "KV_CACHE_TOO_SMALL",
                f"The KV cache holds {num_pages} pages of {page_size} tokens; at least 2 are needed.",
                "Raise --paced-pages or --kv-cache-memory-bytes, or lower --block-size.",
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = BYTES_PER_TOKEN * page_size
        self.states: UInt64 = np.zeros(num_pages * page_size, np.uint64)
        self._bytes = self.states.view(np.uint8).data

    def read_page(self, page: int, /) -> memoryview:
        """Return a read-only view of the live page, not a copy."""
        return self._view(page).toreadonly()

    def write_page(self, page: int, data: bytes | memoryview, /) -> None:
        """Overwrite a page with exactly `page_bytes`. Raises InvalidArgument for another size, for page 0, or for a
        page outside the pool."""
        source = memoryview(data).cast("B")
        if source.nbytes != self.page_bytes or page == 0:
            raise InvalidArgument(
                "BAD_PAGE",
                f"Page {page} cannot take {source.nbytes} bytes: pages have {self.page_bytes}, page 0 is read-only.",
                "Compare page geometries before moving pages.",
            )
        self._view(page)[:] = source

    def _view(self, page: int) -> memoryview:
        """Return a writable view of a page's bytes. Raises InvalidArgument for a page outside the pool."""
        if not 0 <= page < self.num_pages:
            raise InvalidArgument(
                "BAD_PAGE", f"Page {page} is not one of {self.num_pages}.", "Grant pages of this worker's pool only."
            )
        return self._bytes[page * self.page_bytes : (page + 1) * self.page_bytes]

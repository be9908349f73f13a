"""All KV pages of one group in one tensor, and byte views of single pages for transfers.

The pool knows nothing of keys, owners or reference counts: the scheduler allocates pages.
"""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import numpy as np
import torch
from torch import Tensor

from quire_common.credit import KvGroup
from quire_common.errors import ConfigError, InvalidArgument
from quire_worker.arrays import Int32
from quire_worker.kv.page_geometry import page_shape

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DUMMY_PAGE = 0


class PagePool:
    """[pages, kv_head, layer, 2, token, dim]. Page 0 is the dummy page: it is never granted, and always zero on the
    CPU.

    The pool starts as zeros, and a page that a step begins and does not fill is zeroed first. So every number in the
    pool is finite, unless a sequence's own computation gave a number that is not. Masked positions can therefore never
    spoil another request (0 x NaN is NaN).
    """

    def __init__(self, group: KvGroup, page_size: int, num_pages: int) -> None:
        """Allocate the pages in host memory, all zero; page 0 is the dummy. Raises ConfigError below 2 pages."""
        if num_pages < 2:
            raise ConfigError(
                "KV_CACHE_TOO_SMALL",
                f"The KV cache holds {max(0, num_pages)} pages of {group.page_bytes} bytes; at least 2 are needed.",
                "Raise --kv-cache-memory-bytes or lower --block-size.",
            )
        self.page_size = page_size
        self.num_pages = num_pages
        self.page_bytes = group.page_bytes
        self.tensor: Tensor = _zeros((num_pages, *page_shape(group, page_size)), _DTYPES[group.dtype])
        # The same memory as bytes; a view, so moves copy once.
        self._bytes = self.tensor.view(-1).view(torch.uint8).numpy().data

    @classmethod
    def of_bytes(cls, group: KvGroup, page_size: int, capacity_bytes: int) -> PagePool:
        """Make a pool of as many pages as fit into `capacity_bytes`, the dummy page included. Raises ConfigError if
        fewer than 2 fit."""
        return cls(group, page_size, capacity_bytes // group.page_bytes)

    def read_page(self, page: int) -> memoryview:
        """A read-only view of a page's bytes, of the live page, not a copy."""
        return self._view(page).toreadonly()

    def write_page(self, page: int, data: bytes | bytearray | memoryview) -> None:
        """Overwrite a page with exactly `page_bytes`. Raises InvalidArgument for another size, for the dummy page, or
        for a page outside the pool."""
        source = memoryview(data).cast("B")
        if source.nbytes != self.page_bytes or page == DUMMY_PAGE:
            raise InvalidArgument(
                "BAD_PAGE",
                f"Page {page} cannot take {source.nbytes} bytes: pages have {self.page_bytes}, page 0 is read-only.",
                "Compare page geometries before moving pages.",
            )
        self._view(page)[:] = source

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page over another. Raises InvalidArgument as `write_page` does."""
        self.write_page(target, self._view(source))

    def zero_pages(self, pages: Int32) -> None:
        """Zero the given pages."""
        for page in pages:
            self.tensor[int(page)].zero_()

    def _view(self, page: int) -> memoryview:
        """A writable view of a page's bytes; raises InvalidArgument for a page outside the pool."""
        if not 0 <= page < self.num_pages:
            raise InvalidArgument(
                "BAD_PAGE", f"Page {page} is not one of {self.num_pages}.", "Grant pages of this worker's pool only."
            )
        return self._bytes[page * self.page_bytes : (page + 1) * self.page_bytes]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate zeros in huge memory pages if the system has them. Attention reads all over the pool; with small memory
    pages, nearly every KV page would miss the address cache (TLB)."""
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them: slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def pages_to_zero(position: Int32, count: Int32, page_table: Int32, page_size: int) -> Int32:
    """Return the pages that a step begins but does not fill: for each sequence at most one, the page of its last token.
    A sequence is left out if that page had tokens before the step, or if the step fills the page to its end. The caller
    must zero the returned pages, so that no old values lie after the step's tokens."""
    end = position + count
    last = (end - 1) // page_size
    entered = (last * page_size >= position) & (end % page_size != 0)
    rows = np.flatnonzero(entered)
    pages: Int32 = page_table[rows, last[rows]]
    return pages

"""CudaPages: the KV pages of one group on the device, and their bytes for those who move them.

A page is one contiguous piece, so a move is one copy. Copies run on a stream of their own and have ended when a call
returns: a page is moved only when no step in flight touches it, so they wait for no step.
"""

from __future__ import annotations

import torch

from quire_common.errors import ConfigError, InvalidArgument
from quire_worker.kv.page_geometry import KvGroup


class CudaPages:
    """[pages, kv_head, layer, 2, token, dim]; page 0 is the dummy page. Called from the model thread."""

    def __init__(self, group: KvGroup, capacity_bytes: int, device: torch.device) -> None:
        self.page_bytes = group.page_bytes
        self.num_pages = capacity_bytes // group.page_bytes
        if self.num_pages < 2:
            raise ConfigError(
                "KV_CACHE_TOO_SMALL",
                f"{capacity_bytes} bytes hold {self.num_pages} pages of {group.page_bytes}; at least 2 are needed.",
                "Give the KV cache more memory, or lower --block-size.",
                param="kv_cache_memory_bytes",
            )
        self.tensor = torch.zeros((self.num_pages, *group.page_shape), dtype=torch.bfloat16, device=device)
        self._rows = self.tensor.view(self.num_pages, -1).view(torch.uint8)
        self._host = torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=True)
        self._bytes: memoryview = self._host.numpy().data
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def read_page(self, page: int, /) -> memoryview:
        """The page's bytes; valid until the next call."""
        self._check(page)
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._rows[page], non_blocking=True)
        self._stream.synchronize()
        return self._bytes

    def write_page(self, page: int, data: bytes | memoryview, /) -> None:
        """Overwrite a page with exactly page_bytes."""
        self._check(page)
        source = memoryview(data).cast("B")
        if source.nbytes != self.page_bytes or page == 0:
            raise InvalidArgument(
                "BAD_PAGE",
                f"Page {page} cannot take {source.nbytes} bytes: pages have {self.page_bytes}, page 0 is read-only.",
                "Compare page geometries before moving pages.",
            )
        self._bytes[:] = source
        with torch.cuda.stream(self._stream):
            self._rows[page].copy_(self._host, non_blocking=True)
        self._stream.synchronize()

    def _check(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise InvalidArgument(
                "BAD_PAGE", f"Page {page} is not one of {self.num_pages}.", "Grant pages of this worker's pool only."
            )

"""CudaPages: the KV pages of one group on the device, as a tensor for kernels and as bytes for page moves."""

from __future__ import annotations

import torch
from torch import Tensor

from quire_common.credit import KvGroup
from quire_common.errors import ConfigError, InvalidArgument, QuireError
from quire_common.telemetry.logs import get_logger
from quire_worker.arrays import Int32
from quire_worker.cuda.peers.driver import cuda_driver
from quire_worker.cuda.peers.ipc_memory import IpcMemory
from quire_worker.kv.page_geometry import page_shape

log = get_logger(__name__)
_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


class CudaPages:
    """The pages that fit into `capacity_bytes`, all zero: [pages, kv_head, layer, 2, token, dim]; page 0 is the dummy
    page. Called from the model thread. Raises ConfigError if fewer than 2 pages fit."""

    def __init__(self, group: KvGroup, page_size: int, capacity_bytes: int, device: torch.device) -> None:
        self.page_bytes = group.page_bytes
        self.num_pages = capacity_bytes // group.page_bytes
        if self.num_pages < 2:
            raise ConfigError(
                "KV_CACHE_TOO_SMALL",
                f"{capacity_bytes} bytes hold {self.num_pages} pages of {group.page_bytes}; at least 2 are needed.",
                "Give the KV cache more memory, or lower --block-size.",
                param="kv_cache_memory_bytes",
            )
        shape = (self.num_pages, *page_shape(group, page_size))
        self.tensor = torch.zeros(shape, dtype=_DTYPES[group.dtype], device=device)
        self._rows = self.tensor.view(self.num_pages, -1).view(torch.uint8)

    @property
    def rows(self) -> Tensor:
        """uint8 [pages, bytes]."""
        return self._rows

    def descriptor(self) -> bytes:
        """Return the handle with which other processes of this host open the pages' memory. If the memory cannot be
        shared, log a warning and return b""."""
        try:
            return IpcMemory.of(self._rows, cuda_driver()).pack()
        except QuireError as error:
            log.warning("other workers' GPUs cannot read pages here: they go through main memory", cause=error.message)
            return b""

    def bytes_of(self, page: int) -> Tensor:
        """The page's bytes on the device, to be read. Raises InvalidArgument for a page outside the pool."""
        if not 0 <= page < self.num_pages:
            raise InvalidArgument(
                "BAD_PAGE", f"Page {page} is not one of {self.num_pages}.", "Grant pages of this worker's pool only."
            )
        return self._rows[page]

    def check_writable(self, pages: Int32) -> None:
        """Raise InvalidArgument where `writable` would for one of them."""
        if len(pages):
            self.writable(int(pages.min()))
            self.writable(int(pages.max()))

    def writable(self, page: int) -> Tensor:
        """The page's bytes on the device, to be overwritten. Raises InvalidArgument for page 0 or a page outside the
        pool."""
        if page == 0:
            raise InvalidArgument("BAD_PAGE", "Page 0 is read-only.", "Compare page geometries before moving pages.")
        return self.bytes_of(page)

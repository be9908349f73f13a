"""Methods of copying pages from one GPU's memory to another's, with which the gather kernel is compared."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from quire_common.errors import Unavailable
from quire_worker.arrays import Int32
from quire_worker.cuda.peers.driver import CudaDriver
from quire_worker.ops.triton.gather_pages import GatherShape, gather_pages

_IN_STREAM_ORDER, _OVERLAP = 1, 1
# From (source's address, target pool, source pages, target pages): enqueue on the current stream.
Copy = Callable[[int, Tensor, Int32, Int32], None]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class PeerCopies:
    """Each method has the signature of Copy. The driver's calls are declared here, since only this benchmark uses
    them."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._streams = [torch.cuda.Stream() for _ in range(4)]  # type: ignore[no-untyped-call]  # torch's
        address, size = ctypes.c_uint64, ctypes.c_size_t
        driver.library.cuMemcpyDtoDAsync_v2.argtypes = (address, address, size, ctypes.c_void_p)

    def plain(self, source: int, target: Tensor, source_page: Int32, target_page: Int32) -> None:
        """Copy the same number of bytes in one call, whatever the pages. This is the fastest possible copy."""
        self._copy(target.data_ptr(), source, len(source_page) * target.shape[1])

    def loop(self, source: int, target: Tensor, source_page: Int32, target_page: Int32) -> None:
        """A copy per page."""
        for given, taken in _addresses(source, target, source_page, target_page):
            self._copy(given, taken, target.shape[1])

    def loop_on_streams(self, source: int, target: Tensor, source_page: Int32, target_page: Int32) -> None:
        """A copy per page, on four streams by turns."""
        current = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(current)
        for index, (given, taken) in enumerate(_addresses(source, target, source_page, target_page)):
            with torch.cuda.stream(self._streams[index % len(self._streams)]):
                self._copy(given, taken, target.shape[1])
        for stream in self._streams:
            current.wait_stream(stream)

    def batched(self, source: int, target: Tensor, source_page: Int32, target_page: Int32) -> None:
        """Copy all pages with one call of the driver, on its copy engines."""
        pairs = _addresses(source, target, source_page, target_page)
        count = len(pairs)
        array = ctypes.c_uint64 * count
        attributes = _Attributes(order=_IN_STREAM_ORDER, flags=_OVERLAP)
        sizes = (ctypes.c_size_t * count)(*[target.shape[1]] * count)
        first = (ctypes.c_size_t * 1)(0)
        given = array(*(pair[0] for pair in pairs))
        taken = array(*(pair[1] for pair in pairs))
        head = (given, taken, sizes, ctypes.c_size_t(count), ctypes.byref(attributes), first, ctypes.c_size_t(1))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if hasattr(self._driver.library, "cuMemcpyBatchAsync_v2"):
            self._driver.call("cuMemcpyBatchAsync_v2", *head, stream)
        elif hasattr(self._driver.library, "cuMemcpyBatchAsync"):
            failed = ctypes.c_size_t()
            self._driver.call("cuMemcpyBatchAsync", *head, ctypes.byref(failed), stream)
        else:
            raise Unavailable("CUDA_DRIVER", "The driver has no batched copies.", "Use one of CUDA 12.8 or later.")

    def _copy(self, target: int, source: int, size: int) -> None:
        self._driver.call("cuMemcpyDtoDAsync_v2", target, source, size, torch.cuda.current_stream().cuda_stream)


def kernel(shape: GatherShape) -> Copy:
    """One launch of the kernel."""

    def copy(source: int, target: Tensor, source_page: Int32, target_page: Int32) -> None:
        gather_pages(source, target, source_page, target_page, shape)

    return copy


def _addresses(source: int, target: Tensor, source_page: Int32, target_page: Int32) -> list[tuple[int, int]]:
    """Return the addresses of each page, the target's first, then the source's."""
    size, base = target.shape[1], target.data_ptr()
    return [
        (base + given * size, source + taken * size)
        for given, taken in zip(target_page.tolist(), source_page.tolist(), strict=True)
    ]

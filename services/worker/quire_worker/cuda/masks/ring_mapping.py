"""RingMapping: maps the matcher's ring into the GPU's address space, so that a kernel can read masks in host memory.

The kernel is part of a captured step. It reads the masks of the step's rows alone, just before the step samples. A copy
by the host would have to know the rows, and would split the CUDA graph.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from quire_common.errors import ConfigError, QuireError
from quire_worker.cuda.peers.driver import cuda_driver
from quire_worker.matcher.mask_ring import ENTRIES_AT
from quire_worker.ops.triton.masks import MappedRing

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.arrays import UInt8
    from quire_worker.matcher.mask_ring import MaskRing

_MAPPED = 2  # cudaHostRegisterMapped


class RingMapping:
    """`ring` has the address at which the device reads the matcher's ring; on the CPU, this is the ring's own address.
    Raises ConfigError if the driver cannot map the ring."""

    def __init__(self, ring: MaskRing, device: torch.device) -> None:
        self._unregister: Callable[[], object] = lambda: None
        address = self._register(ring.memory) if device.type == "cuda" else int(ring.memory.ctypes.data)
        self.ring = MappedRing(address + ENTRIES_AT, ring.words, ring.entries_per_slot, ring.entry_bytes // 4)

    def close(self) -> None:
        """Give the memory back to the host; no step may read it any more. Idempotent."""
        self._unregister()

    def _register(self, memory: UInt8) -> int:
        """Pin and map the memory; returns its address on the device. The driver would not map the same addresses again
        for others, so the memory is given back before it is freed, whether `close` is called or not."""
        runtime, address = torch.cuda.cudart(), int(memory.ctypes.data)  # type: ignore[no-untyped-call]  # torch's
        if status := int(runtime.cudaHostRegister(address, memory.nbytes, _MAPPED)):
            raise _not_mapped(memory.nbytes, f"cudaHostRegister gives the error {status}")
        self._unregister = weakref.finalize(self, _unregister, memory)
        try:
            return cuda_driver().device_address(address)
        except QuireError as error:
            self.close()
            raise _not_mapped(memory.nbytes, error.message) from error


def _unregister(memory: UInt8) -> None:
    torch.cuda.cudart().cudaHostUnregister(int(memory.ctypes.data))  # type: ignore[no-untyped-call]  # torch's


def _not_mapped(num_bytes: int, cause: str) -> ConfigError:
    """Return the ConfigError for a ring of `num_bytes` that the GPU cannot map; `cause` is in its text."""
    return ConfigError(
        "MASKS_NOT_MAPPED",
        f"The GPU cannot map the {num_bytes} bytes in which the matcher leaves masks: {cause}.",
        "Allow the worker to lock so much memory, or switch grammars off: --max-constrained-seqs 0.",
        param="max_constrained_seqs",
    )

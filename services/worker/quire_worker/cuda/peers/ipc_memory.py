"""IpcMemory: the descriptor by which another process of this host opens a page pool on a GPU. IpcMemory knows nothing
of leases.

A process with the descriptor can read and write the whole pool, so the descriptor travels only where a lease's key
does. Its bytes are a fixed record, never a pickled tensor.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from quire_common.errors import InvalidArgument
from quire_worker.cuda.peers.driver import HANDLE_BYTES
from quire_worker.kv_transfer.peers.peer_access import host_id

if TYPE_CHECKING:
    from torch import Tensor

    from quire_worker.cuda.peers.driver import CudaDriver

_RECORD = struct.Struct(f"<{HANDLE_BYTES}sQQ16s16s")


@dataclass(frozen=True, slots=True)
class IpcMemory:
    """`size` bytes from `offset` on in the allocation that `handle` opens."""

    handle: bytes = field(repr=False)
    offset: int
    size: int
    device: bytes
    """UUID of the GPU."""
    host: bytes
    """See host_id: a handle means nothing on another host."""

    @classmethod
    def of(cls, pool: Tensor, driver: CudaDriver) -> IpcMemory:
        """Describe the memory of a contiguous tensor on a GPU, so that other processes can open it; raises Unavailable
        if it cannot be shared."""
        base, _ = driver.allocation_of(pool.data_ptr())
        return cls(driver.export(base), pool.data_ptr() - base, pool.nbytes, device_uuid(pool.device), host_id())

    def pack(self) -> bytes:
        """A descriptor of transport "cuda_ipc"."""
        return _RECORD.pack(self.handle, self.offset, self.size, self.device, self.host)

    @classmethod
    def unpack(cls, descriptor: bytes) -> IpcMemory:
        """Parse what `pack` made; raises InvalidArgument for another length. Offset and size are compared with the
        allocation when that is opened."""
        if len(descriptor) != _RECORD.size:
            raise InvalidArgument(
                "BAD_DESCRIPTOR",
                f"A descriptor of GPU memory has {len(descriptor)} bytes, not {_RECORD.size}.",
                "Run prefill and decode replicas of one release.",
            )
        return cls(*_RECORD.unpack(descriptor))


def device_uuid(device: torch.device) -> bytes:
    """The GPU's UUID, 16 bytes."""
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")).bytes

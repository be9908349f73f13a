"""The few CUDA driver calls for which torch has no public function: memory that another process may open, and the
device address of host memory.

The calls are bound by ctypes to the driver's own library, which every process with a GPU has loaded. They act on the
current device's context, which torch must have made before (any allocation does so). This module knows nothing of
pages.
"""

from __future__ import annotations

import ctypes
from functools import cache

from quire_common.errors import Unavailable

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """Every call that fails raises Unavailable CUDA_DRIVER, with the driver's own name of what is wrong."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        address, size = ctypes.c_uint64, ctypes.c_size_t
        pointer = ctypes.POINTER
        library.cuGetErrorName.argtypes = (ctypes.c_int, pointer(ctypes.c_char_p))
        library.cuMemGetAddressRange_v2.argtypes = (pointer(address), pointer(size), address)
        library.cuIpcGetMemHandle.argtypes = (pointer(_Handle), address)
        library.cuIpcOpenMemHandle_v2.argtypes = (pointer(address), _Handle, ctypes.c_uint)
        library.cuIpcCloseMemHandle.argtypes = (address,)
        library.cuMemHostGetDevicePointer_v2.argtypes = (pointer(address), ctypes.c_void_p, ctypes.c_uint)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Return the beginning of the allocation that holds an address, and its size in bytes."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def device_address(self, host: int) -> int:
        """Return the address at which the device sees registered host memory."""
        address = ctypes.c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), host, 0)
        return address.value

    def export(self, base: int) -> bytes:
        """A handle to a whole allocation, for another process of this host. Good while the allocation lives."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process, perhaps on another GPU. Returns the address of its beginning in this
        process. Raises Unavailable CUDA_DRIVER if the driver refuses."""
        address = ctypes.c_uint64()
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Unmap what `open` returned. Work of the device that reads it must have ended."""
        self.call("cuIpcCloseMemHandle", address)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver by name; raises Unavailable CUDA_DRIVER with the driver's name of the error if
        it fails."""
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise Unavailable(
                "CUDA_DRIVER",
                f"{name} failed: {self._name_of(status)}.",
                "Both workers need a GPU of one host, and memory from the plain allocator: leave out "
                "expandable_segments in PYTORCH_CUDA_ALLOC_CONF.",
            )

    def _name_of(self, status: int) -> str:
        """Return the driver's name of an error, or its number if the driver has no name for it."""
        name = ctypes.c_char_p()
        known = self.library.cuGetErrorName(status, ctypes.byref(name)) == 0 and name.value
        return name.value.decode() if known and name.value else f"error {status}"


@cache
def cuda_driver() -> CudaDriver:
    """Return the CUDA driver of this machine. Raises Unavailable CUDA_DRIVER if its library is missing or lacks a
    function."""
    try:
        return CudaDriver(ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError) as error:
        raise Unavailable("CUDA_DRIVER", f"The CUDA driver cannot be used: {error}.", "Install one.") from error

"""NVML's figures of a GPU, as metrics: utilisation, memory and power of the whole device, other processes' too.

NVML is the driver's own library. Where it is not there, or does not know the GPU, there are no such metrics.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from prometheus_client.core import GaugeMetricFamily

from quire_common.telemetry import metrics
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
log = get_logger(__name__)


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuCollector:
    """A collector of Prometheus' registry for one GPU. NVML is asked when metrics are read; what it does not answer is
    left out."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def open(cls, uuid: str, library: Any = None) -> GpuCollector | None:
        """Return the collector of the GPU with this UUID, as printed by `nvidia-smi -L`. None if NVML is not there,
        does not start, or does not know the GPU. Tests pass another `library` than the driver's."""
        try:
            library = ctypes.CDLL(_LIBRARY) if library is None else library
        except OSError:
            return None
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() != _SUCCESS:
            return None
        if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
            return None
        return cls(library, handle)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Ask NVML, and yield a gauge for each figure that it answers: utilization, memory used and in all, power."""
        utilization, memory, milliwatts = _Utilization(), _Memory(), ctypes.c_uint()
        if self._asked("nvmlDeviceGetUtilizationRates", utilization):
            yield _gauge("utilization_ratio", "Share of the time in which any kernel ran", utilization.gpu / 100)
        if self._asked("nvmlDeviceGetMemoryInfo", memory):
            yield _gauge("memory_used_bytes", "Memory in use", memory.used)
            yield _gauge("memory_total_bytes", "All memory", memory.total)
        if self._asked("nvmlDeviceGetPowerUsage", milliwatts):
            yield _gauge("power_watts", "Power draw", milliwatts.value / 1000)

    def _asked(self, function: str, answer: Any) -> bool:
        """Whether NVML has filled in the answer."""
        return bool(getattr(self._library, function)(self._handle, ctypes.byref(answer)) == _SUCCESS)


def show_gpu() -> None:
    """Register metrics of the present CUDA device, which are read from NVML. Without NVML, only logs that there are
    none."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    collector = GpuCollector.open(f"GPU-{uuid}") if uuid is not None else None
    if collector is None:
        log.info("no metrics of the GPU itself: NVML is not there, or does not know it")
    else:
        metrics.registry.register(collector)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"quire_worker_gpu_{name}", f"{text}, of the whole GPU, as NVML says.", value)

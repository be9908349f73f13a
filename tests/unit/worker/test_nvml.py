"""Metrics of a GPU come from NVML, where that is there and knows the GPU."""

from __future__ import annotations

import ctypes
from typing import Any

from prometheus_client import CollectorRegistry

from quire_worker.nvml import GpuCollector

UUID = "GPU-11112222-3333-4444-5555-666677778888"
NOT_SUPPORTED = 3


class FakeNvml:
    """Knows one GPU. Functions get what ctypes would hand to the library."""

    def __init__(self, *, power: int = 0, init: int = 0) -> None:
        self._power = power
        self._init = init

    def nvmlInit_v2(self) -> int:
        return self._init

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 77
        return 0 if uuid.decode() == UUID else 6

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, answer: Any) -> int:
        assert handle.value == 77
        answer._obj.gpu, answer._obj.memory = 83, 40
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, answer: Any) -> int:
        answer._obj.total, answer._obj.used = 80 << 30, 3 << 30
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p, answer: Any) -> int:
        answer._obj.value = 412_500
        return self._power


def values(library: FakeNvml) -> dict[str, float]:
    collector, registry = GpuCollector.open(UUID, library), CollectorRegistry()
    assert collector is not None
    registry.register(collector)
    return {
        sample.name.removeprefix("quire_worker_gpu_"): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_figures_have_prometheus_units() -> None:
    assert values(FakeNvml()) == {
        "utilization_ratio": 0.83,
        "memory_used_bytes": 3 << 30,
        "memory_total_bytes": 80 << 30,
        "power_watts": 412.5,
    }


def test_what_the_gpu_does_not_tell_is_left_out() -> None:
    assert "power_watts" not in values(FakeNvml(power=NOT_SUPPORTED))


def test_without_nvml_or_for_a_gpu_that_it_does_not_know_there_is_nothing() -> None:
    assert GpuCollector.open("GPU-other", FakeNvml()) is None
    assert GpuCollector.open(UUID, FakeNvml(init=9)) is None

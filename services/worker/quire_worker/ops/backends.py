"""The implementations of `Ops` by name. A module of an implementation is imported at its first use, because compilers
take long to import.

This module alone decides which implementation a device uses. The implementation of a GPU is made where its model is
loaded (cuda/load.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire_common.errors import ConfigError
from quire_common.telemetry.logs import get_logger
from quire_worker.ops.interface import HeadShape, Ops

log = get_logger(__name__)


def backend_on(device: str, name: str) -> str:
    """Return the name of the attention backend to use on `device` (cpu or cuda). `auto` is the device's default. Raises
    ConfigError if the device has no backend of this name."""
    supported = SUPPORTED[device]
    if name == "auto":
        return supported[0]
    if name not in supported:
        raise ConfigError(
            "UNKNOWN_ATTENTION_BACKEND",
            f"There is no attention backend {name!r} on {device}.",
            f"Choose one of {', '.join(('auto', *supported))}.",
            param="attention_backend",
        )
    return name


def make_ops(name: str, shape: HeadShape, page_size: int) -> Ops[Any]:
    """Make the named implementation (or `auto`) for the CPU, ready to run. `cpu` becomes the torch reference if the
    kernels cannot compute heads of this size. Raises ConfigError for an unknown name."""
    return BACKENDS[backend_on("cpu", name)](shape, page_size)


def _cpu(shape: HeadShape, page_size: int) -> Ops[Any]:
    """Make the implementation with compiled kernels. If they do not support the head size, log this and make the torch
    reference instead."""
    from quire_worker.ops.cpu.cpu_ops import CpuOps

    if not CpuOps.supports(shape):
        log.info("torch computes attention: no kernel for this head size", head_dim=shape.head_dim)
        return _torch(shape, page_size)
    return CpuOps(shape, page_size)


def _torch(shape: HeadShape, page_size: int) -> Ops[Any]:
    """Make the torch reference implementation."""
    from quire_worker.ops.torch_reference import TorchOps

    return TorchOps(shape, page_size)


BACKENDS: dict[str, Callable[[HeadShape, int], Ops[Any]]] = {"cpu": _cpu, "torch": _torch}
SUPPORTED: dict[str, tuple[str, ...]] = {"cpu": tuple(BACKENDS), "cuda": ("cudnn", "triton")}
"""Names by device, the default first. On a GPU, Triton's kernels compute attention. With cudnn, torch computes the
attention of long prompts that begin in a step, if the model allows it."""

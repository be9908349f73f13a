"""The GPUs that the workers of a local stack may use, and the GPU of each worker. This module asks no driver, because
the machine may have none."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")
_DEVICE = re.compile(r"nvidia\d+")


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names; for CUDA, a negative number ends the list. If the variable is
    not set, return 0, 1, ... for as many GPUs as there are files /dev/nvidiaN; empty if there are none."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        names = takewhile(lambda name: not name.startswith("-"), map(str.strip, named.split(",")))
        return tuple(filter(None, names))
    try:
        count = sum(bool(_DEVICE.fullmatch(entry.name)) for entry in _DEVICES.iterdir())
    except OSError:
        return ()
    return tuple(str(number) for number in range(count))


def gpu_environment(workers: Sequence[str], member: str) -> dict[str, str]:
    """Return the environment variable that gives the worker `member` a GPU of its own. If there are fewer GPUs than
    workers, workers share GPUs. Returns {} if there is only one worker, or fewer than two GPUs."""
    gpus = visible_gpus()
    if len(workers) < 2 or len(gpus) < 2:
        return {}
    return {VISIBLE: gpus[workers.index(member) % len(gpus)]}

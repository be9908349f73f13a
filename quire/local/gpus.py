"""Which GPUs a local stack's workers may use, and which is whose. Asks no driver: it may not be there."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")
_DEVICE = re.compile(r"nvidia\d+")


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names; all of the machine's where it is not set."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return tuple(each.strip() for each in named.split(",") if each.strip())
    try:
        count = sum(bool(_DEVICE.fullmatch(entry.name)) for entry in _DEVICES.iterdir())
    except OSError:
        return ()
    return tuple(str(number) for number in range(count))


def gpu_environment(workers: Sequence[str], member: str) -> dict[str, str]:
    """Return the variable that gives this worker a GPU of its own, by turns where there are fewer GPUs. Empty where
    there is only one worker, or fewer than two GPUs."""
    gpus = visible_gpus()
    if len(workers) < 2 or len(gpus) < 2:
        return {}
    return {VISIBLE: gpus[workers.index(member) % len(gpus)]}

"""One step on a device, waited for."""

from __future__ import annotations

import threading
from dataclasses import replace

from quire_worker.engine.ports import Device, StepOutcome
from quire_worker.step import StepBatch

_LIMIT_S = 120.0


def run_one(device: Device, batch: StepBatch) -> StepOutcome:
    """What came of it."""
    ended = threading.Event()
    device.wake = ended.set
    device.launch(replace(batch, token=batch.token.copy()))
    if not ended.wait(_LIMIT_S):
        raise RuntimeError("the step does not end")
    (outcome,) = device.take_outcomes()
    return outcome

"""What CudaDevice says of a step's time: an idle GPU waited, and only what it computed is forward time."""

from __future__ import annotations

import time

import pytest
import torch

from tests.kernels.steps.launch_rig import LastTokenModel, Rig, cuda_device, without_streams

# The interpreter computes with numpy, which tells of -inf - -inf and the like.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="streams are stood in for"),
]
IDLE_S = 3_600.0 * 5


def test_idle_time_is_waited_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_streams(monkeypatch)
    model = LastTokenModel()
    rig = Rig(model, cuda_device(model))
    outcomes = [rig.step([0, 1], position) for position in range(2)]
    real = time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter_ns", lambda: real() + int(IDLE_S * 1e9))
    outcomes += [rig.step([0, 1], position) for position in range(2)]
    rig.device.close()
    steps = [(outcome.wait_us, outcome.timing.forward_us) for outcome in outcomes]
    assert max(wait for wait, _ in steps) >= IDLE_S * 1e6
    assert sum(wait >= IDLE_S * 1e6 for wait, _ in steps) == 1
    assert max(forward for _, forward in steps) < 60e6, "idle time counts as forward time"

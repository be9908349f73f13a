"""A graph is looked for once for sequences that go on decoding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire_worker.cuda.step_size import StepSize
from tests.gpu.launching import run_one
from tests.kernels.steps.launch_rig import LastTokenModel, Rig, cuda_device, without_streams

# The interpreter computes with numpy, which tells of -inf - -inf and the like.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="streams are stood in for"),
]


class _Asked:
    """Stands for StepGraphs that have none: what was asked for."""

    def __init__(self) -> None:
        self.sizes: list[StepSize] = []

    def find(self, size: StepSize, *, fresh: bool) -> None:
        """Nothing."""
        self.sizes.append(size)


def test_a_graph_is_looked_for_where_others_run_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    without_streams(monkeypatch)
    asked, model = _Asked(), LastTokenModel()
    device = cuda_device(model, lambda *_: asked)
    rig = Rig(model, device)
    first = rig.batch([0, 1], 1)
    steps = [rig.batch([0, 1], 0), first, *(replace(first, position=first.position + more) for more in (1, 2, 3))]
    told = [run_one(device, step).token[:, 0].tolist() for step in steps]
    assert [list(each) for each in zip(*told, strict=True)] == [rig.alone(slot, 5) for slot in (0, 1)]
    assert asked.sizes == [StepSize(0, 2, 2), StepSize(2)]
    blocked = replace(first, position=first.position + 4, blocked={1: np.array([3], np.int32)})
    for step in (blocked, first, rig.batch([0, 1], 6), rig.batch([1], 7)):
        run_one(device, step)
    assert asked.sizes[2:] == [StepSize(2), StepSize(2), StepSize(2), StepSize(1)]
    device.close()

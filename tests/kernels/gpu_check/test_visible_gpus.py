"""The GPUs that the checks between two GPUs hand out to their processes."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.peers.pull import visible_gpus
from quire.local.gpus import VISIBLE


@pytest.mark.parametrize(
    ("named", "gpus"), [("0,1", ["0", "1"]), ("3, GPU-5f", ["3", "GPU-5f"]), ("2,-1,0", ["2"]), (None, ["0", "1", "2"])]
)
def test_gpus_behind_a_negative_number_are_none(
    monkeypatch: pytest.MonkeyPatch, named: str | None, gpus: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    if named is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, named)
    assert visible_gpus() == gpus

"""Workers of a local stack, and the GPU that each sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.local import gpus
from quire.local.gpus import VISIBLE, visible_gpus
from quire.local.spec import StackSpec


def _seen(spec: StackSpec) -> list[str | None]:
    return [spec.environment(worker).get(VISIBLE) for worker in spec.members_of("worker")]


def test_each_worker_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "2, GPU-5f")
    pairs = StackSpec("pairs", "model", replicas=0, prefill=1, decode=2)
    assert _seen(pairs) == ["2", "GPU-5f", "2"]
    # The others compute nothing, and one alone takes what it was given.
    assert pairs.environment("router")[VISIBLE] == "2, GPU-5f"
    assert _seen(StackSpec("one", "model")) == ["2, GPU-5f"]


def test_gpus_are_counted_where_none_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus() == ("0", "1")
    assert _seen(StackSpec("two", "model", replicas=2)) == ["0", "1"]
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path / "absent")
    assert visible_gpus() == ()
    assert _seen(StackSpec("two", "model", replicas=2)) == [None, None]


@pytest.mark.parametrize("hidden", ["", "-1", "-1,0,1"])
def test_nothing_is_shared_out_where_gpus_are_hidden(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv(VISIBLE, hidden)
    assert visible_gpus() == ()
    assert _seen(StackSpec("two", "model", replicas=2)) == [hidden, hidden]


def test_gpus_behind_a_negative_number_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0, 1, -1, 2")
    assert visible_gpus() == ("0", "1")

"""Memory of models in the Transformers backend: the place of weights while they are loaded, and the memory of steps."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire_common.errors import ConfigError
from quire_worker.cuda.memory import pool_bytes
from quire_worker.loading import LoadOptions, find_source
from quire_worker.transformers_backend import weights
from quire_worker.transformers_backend.source import TransformersSource
from quire_worker.transformers_backend.step_memory import measure_row_bytes
from quire_worker.transformers_backend.weights import load_weights, make_dummy
from quire_worker.weights.checkpoint import Checkpoint
from tests.parity.families import write_random
from tests.parity.transformers_models import CASES, write_transformers_model
from tests.tiers import deep_after


def source_of(folder: Path) -> TransformersSource:
    found = find_source(folder, LoadOptions(model_impl="transformers"), lambda *_: None)
    assert isinstance(found, TransformersSource)
    return found


def bytes_on_host() -> int:
    """Bytes of all tensors in the host's memory. A tensor that another thread is just making may have no storage yet,
    and is left out."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # NotImplementedError is one
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("name", deep_after(1, ["mixtral", "gpt-oss", "helium"]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_a_device_never_lie_in_the_hosts_memory(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The meta device stands for a GPU: what lies there takes no memory."""
    found, seen = source_of(write_transformers_model(name, tmp_path)).found, []
    before = bytes_on_host()

    def look(done: int, total: int) -> None:
        if done > total * 0.9:
            seen.append((bytes_on_host() - before, total))

    with Checkpoint(tmp_path) as checkpoint:
        loaded = load_weights(found, checkpoint, dtype, torch.device("meta"), look)
    assert seen and max(held / total for held, total in seen) < 0.3, "tensors of the host pile up"
    assert loaded.num_bytes > loaded.parameters * dtype.itemsize


def test_a_full_device_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers tells nothing but that a tensor failed; the GPU's allocator counts."""
    found = source_of(write_transformers_model("mixtral", tmp_path)).found
    shortages = iter((3, 4, 4, 4))

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(weights, "_memory_shortages", lambda _: next(shortages))
    monkeypatch.setattr(weights, "copy_tensors", full)
    for error in (torch.OutOfMemoryError, ConfigError):  # the second time, no shortage is counted
        with Checkpoint(tmp_path) as checkpoint, pytest.raises(error):
            load_weights(found, checkpoint, torch.bfloat16, torch.device("meta"), lambda *_: None)


def test_dummy_weights_are_made_on_their_device(tmp_path: Path) -> None:
    found = source_of(write_transformers_model("mixtral", tmp_path)).found
    made: list[str] = []
    build = type(found).build

    def watched(*args: Any, **choices: Any) -> Any:
        model = build(*args, **choices)
        made.extend(each.device.type for each in model.parameters())
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(found), "build", watched)
        make_dummy(found, torch.bfloat16, torch.device("meta"), 0)
    assert set(made) == {"meta"}


@pytest.mark.parametrize("name", deep_after(2, CASES))
def test_a_step_takes_more_with_each_row(name: str, tmp_path: Path) -> None:
    source = source_of(write_transformers_model(name, tmp_path))
    spec = source.measured().spec
    assert source.spec.row_bytes == 0, "measured for a GPU alone"
    widest = 2 * (spec.hidden_size + 3 * spec.heads * spec.head_dim)
    assert widest < spec.row_bytes < 100 * widest
    assert pool_bytes(spec, 9, 1, 10) - pool_bytes(spec, 8, 1, 10) == spec.row_bytes


def test_the_experts_of_a_step_have_their_place_in_the_budget(tmp_path: Path) -> None:
    """A row goes through several experts, whose weights are no linear layers."""
    found = []
    for experts in (1, 4):
        changes = {"num_local_experts": 4, "num_experts_per_tok": experts, "intermediate_size": 320}
        folder = write_random("MixtralConfig", "MixtralForCausalLM", changes, tmp_path / str(experts), seed=1)
        found.append(measure_row_bytes(source_of(folder).found))
    gates_and_ups = 2 * 2 * 320
    assert found[1] - found[0] > 3 * gates_and_ups

"""How the norms' weights are taken from the store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from quire_worker.model.arch_spec import ArchSpec, NormSpec
from quire_worker.model.mixers import _head_weights
from quire_worker.model.norms import Norm
from quire_worker.weights.parameter_store import ParameterStore

# In bfloat16, 1 + 1/512 is 1.
WEIGHT = torch.tensor([1 / 512, -0.25], dtype=torch.bfloat16)


def parts(norm: NormSpec) -> tuple[ArchSpec, ParameterStore]:
    def get(name: str, layer: int) -> torch.Tensor | None:
        return None if name.endswith("bias") else WEIGHT

    spec = SimpleNamespace(norm=norm, hidden_size=2)
    store = SimpleNamespace(get=get, require=get, dtype=torch.bfloat16, device=torch.device("cpu"))
    return cast("ArchSpec", spec), cast("ParameterStore", store)


def test_offset_of_an_rms_norm_is_added_in_float32() -> None:
    norm = Norm.load(*parts(NormSpec(1e-6, weight_offset=1.0)), "input_norm", 0)
    assert norm.weight.dtype == torch.float32 and norm.weight.tolist() == [1 + 1 / 512, 0.75]


def test_offset_of_head_norms_is_added_in_float32() -> None:
    spec, store = parts(NormSpec(1e-6, weight_offset=1.0))
    weight = _head_weights(spec, store, "q", 0)
    assert weight.dtype == torch.float32 and weight.tolist() == [1 + 1 / 512, 0.75]


@pytest.mark.parametrize("norm", [NormSpec(1e-6), NormSpec(1e-6, "layer", weight_offset=1.0)], ids=["rms", "layer"])
def test_other_norms_keep_the_stores_type(norm: NormSpec) -> None:
    assert Norm.load(*parts(norm), "input_norm", 0).weight.dtype == torch.bfloat16

"""--quantize int8: which weights become int8 blocks at load, with which values, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quire_common.errors import ConfigError, Unsupported
from quire_common.gguf.block_kinds import KIND_NAMED
from quire_worker.config import WorkerConfig
from quire_worker.loading import LoadedModel, LoadOptions, load_model
from quire_worker.model.parameters import ParameterSpec, Partition
from quire_worker.model_source import load_configured
from quire_worker.weights.int8_blocks import int8_specs, quantize_int8
from quire_worker.weights.parameter_store import ParameterStore
from tests.gguf.tiny import TinyModel
from tests.model.batches import Run, make_batch
from tests.model.folders import FAMILIES, random_tensors, write_config, write_single

pytestmark = pytest.mark.usefixtures("one_thread")
Q8_0 = gguf.GGMLQuantizationType.Q8_0
WEIGHT = ParameterSpec("q.weight", 0, (1030, 64), Partition(), "qkv.weight")


def load(model: Path, **more: Any) -> LoadedModel:
    return load_model(model, LoadOptions(kv_cache_bytes=1 << 20, **more))


def logits(model: LoadedModel) -> torch.Tensor:
    return model.runner.all_logits(make_batch([Run([5, 6, 7, 3, 1], 0, [1])])).clone()


def quantized(values: torch.Tensor) -> torch.Tensor:
    """The blocks that a weight of the store becomes: [rows, bytes of a row]."""
    store = ParameterStore([WEIGHT], stored={("q.weight", 0): KIND_NAMED["F32"]})
    store.destination(WEIGHT).copy_(values)
    quantize_int8(store, [WEIGHT])
    blocks = store.blocks_of(WEIGHT, KIND_NAMED["Q8_0"])
    assert blocks is not None
    return blocks


@pytest.mark.parametrize("deviation", [1e-6, 0.02, 300.0])
def test_blocks_are_those_of_the_gguf_package(deviation: float) -> None:
    values = torch.randn(WEIGHT.shape, generator=torch.Generator().manual_seed(4)) * deviation
    values[3, :32] = 0.0
    values[4, :4] = torch.tensor([127.0, 0.5, -0.5, 1.5])  # halves are rounded away from zero
    assert np.array_equal(quantized(values).numpy(), gguf.quants.quantize(values.numpy(), Q8_0))


def test_a_gguf_file_of_these_blocks_is_the_same_model(tmp_path: Path) -> None:
    floats = TinyModel().write(tmp_path / "floats.gguf")
    blocks = TinyModel(kind=Q8_0).write(tmp_path / "blocks.gguf")
    found = logits(load(floats, quantize="int8"))
    assert torch.equal(found, logits(load(blocks)))
    assert not torch.equal(found, logits(load(floats)))
    assert torch.equal(logits(load(blocks, quantize="int8")), logits(load(blocks)))


def test_only_whole_blocks_of_floats_are_quantized() -> None:
    kinds = {(name, 0): KIND_NAMED[name] for name in ("Q4_1", "F32", "F16", "BF16")}
    specs = [ParameterSpec(name, 0, (8, 64), Partition(), name) for name in (*(name for name, _ in kinds), "norm")]
    assert [each.role for each in int8_specs(specs, kinds)] == ["F32", "F16", "BF16"]
    odd = ParameterSpec("F32", 0, (8, 48), Partition(), "F32")
    assert int8_specs([odd], kinds) == []


def test_a_quantized_model_is_another_model_and_takes_less_memory(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_single(model, random_tensors(write_config(model, **FAMILIES["llama-32"])))
    plain, small = load(model), load(model, quantize="int8")
    assert plain.facts.digest != small.facts.digest
    assert plain.geometry.namespace != small.geometry.namespace
    assert torch.allclose(logits(plain), logits(small), atol=0.05)
    assert quantized(torch.ones(WEIGHT.shape)).nbytes * 3.7 < WEIGHT.shape[0] * WEIGHT.shape[1] * 4


def test_a_model_without_floats_stays_the_same_model(tmp_path: Path) -> None:
    blocks = TinyModel(kind=Q8_0).write(tmp_path / "blocks.gguf")
    assert load(blocks, quantize="int8").geometry == load(blocks).geometry


def test_both_backends_compute_with_the_same_blocks(tmp_path: Path) -> None:
    write_config(tmp_path, **FAMILIES["llama-32"])
    cpu, reference = (
        logits(load(tmp_path, load_format="dummy", quantize="int8", attention_backend=each))
        for each in ("cpu", "torch")
    )
    assert torch.allclose(cpu, reference, atol=1e-3)


@pytest.mark.parametrize("value", [1e7, float("inf"), float("nan")])
def test_a_value_that_no_block_holds_is_refused(value: float) -> None:
    values = torch.ones(WEIGHT.shape)
    values[1029, 63] = value
    with pytest.raises(ConfigError, match=r"DTYPE_TOO_NARROW: int8 blocks .* q.weight of layer 0.*Leave --quantize"):
        quantized(values)


def test_a_gpu_refuses_the_option(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(Unsupported, match=r"UNSUPPORTED_QUANTIZATION: --quantize int8 .*--device cpu"):
        load_configured(WorkerConfig(model=str(tmp_path), device="cuda", quantize="int8"), lambda *_: None)


def test_the_option_reaches_the_model(tmp_path: Path) -> None:
    write_config(tmp_path, **FAMILIES["llama-32"])
    digests = {
        load_configured(
            WorkerConfig(
                model=str(tmp_path), device="cpu", kv_cache_memory_bytes=1 << 20, load_format="dummy", quantize=each
            ),
            lambda *_: None,
        ).info.digest
        for each in ("none", "int8")
    }
    assert len(digests) == 2

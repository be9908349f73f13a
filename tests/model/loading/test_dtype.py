"""--dtype: which weights are rounded at load, that they count as another model, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from quire_common.errors import ConfigError, Unsupported
from quire_common.gguf.block_kinds import KIND_NAMED
from quire_worker.config import WorkerConfig
from quire_worker.loading import DType, LoadedModel, LoadOptions, load_model
from quire_worker.model.parameters import ParameterSpec, Partition
from quire_worker.model_source import load_configured
from quire_worker.weights.parameter_store import ParameterStore
from quire_worker.weights.rounding import rounded_kinds
from tests.gguf.tiny import TinyModel
from tests.model.batches import Run, make_batch
from tests.model.folders import FAMILIES, random_tensors, write_config, write_single

TYPES: dict[DType, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


pytestmark = pytest.mark.usefixtures("one_thread")


def write(folder: Path, kind: torch.dtype, rounded: torch.dtype | None = None, **changes: Any) -> Path:
    """A folder with weights of one type; those of two axes hold only values that `rounded` can hold."""
    tensors = random_tensors(write_config(folder, **(FAMILIES["llama-32"] | changes)))
    generator = torch.Generator().manual_seed(9)
    for name, values in tensors.items():
        exact = values.float() + torch.randn(values.shape, generator=generator) * 1e-3
        exact = exact.to(rounded).float() if rounded and exact.ndim == 2 else exact
        tensors[name] = exact.to(kind) if exact.ndim == 2 else exact
    write_single(folder, tensors)
    return folder


def load(model: Path, dtype: DType = "auto", **more: Any) -> LoadedModel:
    return load_model(model, LoadOptions(kv_cache_bytes=1 << 20, dtype=dtype, **more))


def logits(model: LoadedModel) -> torch.Tensor:
    return model.runner.all_logits(make_batch([Run([5, 6, 7, 3, 1], 0, [1])])).clone()


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_are_rounded_as_if_the_file_had_them_so(dtype: DType, tmp_path: Path) -> None:
    exact = write(tmp_path / "exact", torch.float32)
    rounded = write(tmp_path / "rounded", torch.float32, TYPES[dtype])
    found, wanted = logits(load(exact, dtype)), logits(load(rounded))
    assert torch.equal(found, wanted)
    assert not torch.equal(found, logits(load(exact)))


@pytest.mark.parametrize("dtype", TYPES)
def test_one_16_bit_type_becomes_the_other(dtype: DType, tmp_path: Path) -> None:
    other = next(kind for kind in TYPES.values() if kind != TYPES[dtype])
    file = write(tmp_path / "file", other)
    twice = write(tmp_path / "twice", torch.float32, other)
    assert torch.equal(logits(load(file, dtype)), logits(load(twice, dtype)))


def test_a_rounded_model_is_another_model(tmp_path: Path) -> None:
    model = write(tmp_path, torch.float32)
    loaded = {dtype: load(model, dtype) for dtype in ("auto", "float32", "bfloat16", "float16")}
    for found in (
        {dtype: each.facts.digest for dtype, each in loaded.items()},
        {dtype: each.geometry.namespace for dtype, each in loaded.items()},
    ):
        assert found["auto"] == found["float32"] and len(set(found.values())) == 3


def test_what_has_the_type_already_is_the_same_model(tmp_path: Path) -> None:
    model = write(tmp_path, torch.bfloat16)
    assert load(model, "bfloat16").geometry == load(model).geometry


def test_rounding_halves_the_memory() -> None:
    spec = ParameterSpec("q.weight", 0, (64, 32), Partition(), "qkv.weight")
    plain = {("q.weight", 0): KIND_NAMED["F32"]}
    kinds = [plain | rounded_kinds(plain, each) for each in ("auto", "float16")]
    assert [ParameterStore([spec], stored=each).num_bytes for each in kinds] == [8192, 4096]


def test_quantized_blocks_keep_their_values(tmp_path: Path) -> None:
    kinds = {(name, 0): KIND_NAMED[name] for name in ("Q4_1", "F32", "F16", "BF16")}
    assert rounded_kinds(kinds, "bfloat16") == dict.fromkeys([("F32", 0), ("F16", 0)], KIND_NAMED["BF16"])
    assert rounded_kinds(kinds, "auto") == rounded_kinds(kinds, "float32") == {}


def test_floats_of_a_gguf_file_are_rounded_too(tmp_path: Path) -> None:
    def rounded(weights: dict[str, Any]) -> None:
        for name, values in weights.items():
            if values.ndim == 2:
                weights[name] = torch.from_numpy(values).bfloat16().float().numpy()

    exact = TinyModel().write(tmp_path / "exact.gguf")
    already = TinyModel(change=rounded).write(tmp_path / "rounded.gguf")
    stored = TinyModel(kind=gguf.GGMLQuantizationType.BF16).write(tmp_path / "stored.gguf")
    found = logits(load(exact, "bfloat16"))
    assert torch.equal(found, logits(load(already))) and not torch.equal(found, logits(load(exact)))
    assert torch.equal(logits(load(stored, "bfloat16")), logits(load(stored)))


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tensors = random_tensors(write_config(model))
    tensors["model.layers.1.mlp.up_proj.weight"][79, 47] = 70_000.0
    write_single(model, tensors)
    load(model, "bfloat16")
    with pytest.raises(ConfigError, match=r"DTYPE_TOO_NARROW: float16 .* up.weight of layer 1.*65504"):
        load(model, "float16")


def test_dummy_weights_are_rounded_too(tmp_path: Path) -> None:
    write_config(tmp_path, **FAMILIES["llama-32"])
    plain, narrow = (load(tmp_path, each, load_format="dummy", seed=1) for each in ("auto", "float16"))
    assert torch.allclose(logits(plain), logits(narrow), atol=1e-2)
    assert plain.facts.digest != narrow.facts.digest


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_gpu_refuses_what_its_kernels_do_not_compute(dtype: str, tmp_path: Path) -> None:
    model = write(tmp_path, torch.float32)
    with pytest.raises(Unsupported, match=f"UNSUPPORTED_DTYPE: --dtype {dtype}.*bfloat16"):
        load_configured(WorkerConfig(model=str(model), device="cuda", dtype=dtype), lambda *_: None)


def test_the_option_reaches_the_model(tmp_path: Path) -> None:
    model = write(tmp_path, torch.float32)
    digests = {
        load_configured(
            WorkerConfig(model=str(model), device="cpu", kv_cache_memory_bytes=1 << 20, dtype=dtype), lambda *_: None
        ).info.digest
        for dtype in ("auto", "bfloat16")
    }
    assert len(digests) == 2

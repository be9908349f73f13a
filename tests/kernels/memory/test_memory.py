"""How much memory KV pages take, and what is said where there is too little."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn
from unittest.mock import MagicMock

import pytest
import torch

from quire_common.errors import ConfigError, Unsupported
from quire_worker import model_source
from quire_worker.config import WorkerConfig
from quire_worker.cuda import load
from quire_worker.cuda.logits_states import LogitsStates
from quire_worker.cuda.memory import (
    LOGITS_STATE_BYTES,
    STEP_FIX,
    kv_cache_bytes,
    naming_out_of_memory,
    pool_bytes,
    step_bytes,
)
from quire_worker.kv.page_geometry import kv_groups
from quire_worker.loading import LoadOptions, load_model
from quire_worker.model.arch_spec import ArchSpec
from tests.model.folders import FAMILIES, load_dummy_model, write_config

GIB = 1 << 30


def test_pages_take_what_the_share_leaves() -> None:
    total, free = 100 * GIB, 80 * GIB
    assert kv_cache_bytes(free, total, 0.9, 5 * GIB) == 80 * GIB - 10 * GIB - 5 * GIB - GIB
    assert kv_cache_bytes(free, total, 0.5, 5 * GIB) == kv_cache_bytes(free, total, 0.9, 5 * GIB) - 40 * GIB
    with pytest.raises(ConfigError, match="81920 MiB are free") as error:
        kv_cache_bytes(free, total, 0.1, 5 * GIB)
    assert error.value.code == "GPU_MEMORY_TOO_SMALL" and "--gpu-memory-utilization" in error.value.fix


def test_larger_steps_leave_less(tmp_path: Path) -> None:
    spec = load_dummy_model(tmp_path, **FAMILIES["qwen3"]).spec
    assert step_bytes(spec, 64, 8, 1000) < step_bytes(spec, 128, 8, 1000) < step_bytes(spec, 128, 9, 1000)


def test_both_pools_have_their_place_in_the_budget(tmp_path: Path) -> None:
    """One of graphs, one of steps that run kernel by kernel; the logits of all lie in one place."""
    spec = load_dummy_model(tmp_path, **FAMILIES["qwen3"]).spec
    assert isinstance(spec, ArchSpec)
    pool, logits = pool_bytes(spec, 64, 8, 1000), 2 * 8 * 1000
    assert step_bytes(spec, 64, 8, 1000) == 2 * pool + logits + LOGITS_STATE_BYTES
    gates = 2 * 2 * 64 * spec.intermediate_size
    assert pool > gates + gates // 2, "a product of gates and ups, and what comes of it"


def test_logits_states_have_their_place_in_the_budget(tmp_path: Path) -> None:
    spec = load_dummy_model(tmp_path, **FAMILIES["qwen3"]).spec
    assert step_bytes(spec, 1, 1, 10) > LOGITS_STATE_BYTES
    assert LogitsStates(torch.device("cpu"), 97)._most_bytes == LOGITS_STATE_BYTES


def test_pages_in_eight_bits_are_half_as_large(tmp_path: Path) -> None:
    spec = load_dummy_model(tmp_path, **FAMILIES["qwen3"]).spec
    (wide,), (narrow,) = kv_groups(spec, 64, "bfloat16"), kv_groups(spec, 64, "float8_e4m3fn")
    assert wide.page_bytes == 2 * narrow.page_bytes


def test_the_cpu_refuses_pages_in_eight_bits(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(Unsupported, match="--kv-cache-dtype fp8") as error:
        load_model(tmp_path, LoadOptions(load_format="dummy", kv_cache_dtype="fp8"))
    assert error.value.param == "kv_cache_dtype"


def test_pages_are_measured_against_the_memory_that_they_lie_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may have less memory than its GPU is given pages."""
    there = {"gpu": False}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there["gpu"])
    monkeypatch.setattr(model_source, "_load_on_gpu", lambda *_: "on the GPU")
    monkeypatch.setattr(os, "sysconf", lambda _: 1 << 14)
    write_config(tmp_path)
    config = WorkerConfig(model=str(tmp_path), kv_cache_memory_bytes=(1 << 28) + 1, load_format="dummy")
    for device in ("auto", "cpu"):
        with pytest.raises(ConfigError) as error:
            model_source.load_configured(replace(config, device=device), lambda *_: None)
        assert error.value.code == "KV_CACHE_TOO_LARGE" and error.value.param == "kv_cache_memory_bytes"
    there["gpu"] = True
    for device in ("auto", "cuda"):
        assert model_source.load_configured(replace(config, device=device), lambda *_: None) == "on the GPU"  # type: ignore[comparison-overlap]  # what stands for it
    with pytest.raises(ConfigError, match="more than this host's"):
        model_source.load_configured(replace(config, device="cpu"), lambda *_: None)


def test_out_of_memory_is_named_with_what_to_do() -> None:
    naming = naming_out_of_memory("a step", STEP_FIX, "gpu_memory_utilization")
    with pytest.raises(ConfigError, match="no memory left for a step: CUDA out") as error, naming:
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert error.value.code == "GPU_OUT_OF_MEMORY" and "--max-num-batched-tokens" in error.value.fix
    with pytest.raises(ValueError, match="another"), naming_out_of_memory("a step", STEP_FIX):
        raise ValueError("another")


@pytest.mark.parametrize("place", ["logits", "decoder"])
def test_out_of_memory_after_the_pages_is_named_too(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu = SimpleNamespace(
        current_device=lambda: 0,
        mem_get_info=lambda device: (80 * GIB, 80 * GIB),
        get_device_name=lambda device: "a GPU",
        get_device_capability=lambda device: (9, 0),
    )
    on_cpu = SimpleNamespace(
        cuda=gpu,
        device=lambda *_: torch.device("cpu"),
        inference_mode=torch.inference_mode,
        empty=fail if place == "logits" else torch.empty,
        bfloat16=torch.bfloat16,
    )
    weights = SimpleNamespace(num_bytes=1, digest=b"", decoder=fail)
    source = SimpleNamespace(spec=SimpleNamespace(vocab_size=97), load=lambda *_: weights)
    source.measured = lambda: source
    monkeypatch.setattr(load, "torch", on_cpu)
    monkeypatch.setattr(load, "find_source", lambda *_: source)
    monkeypatch.setattr(load, "kv_groups", lambda *_: [None])
    for name in ("check_kernels", "step_bytes", "CudaPages", "gemm_configs_for", "TritonOps", "HeadShape"):
        monkeypatch.setattr(load, name, MagicMock())
    with pytest.raises(ConfigError, match=f"beside {60 * GIB} bytes of KV pages: CUDA out") as error:
        load.load_cuda_model("model", LoadOptions(), load.CudaOptions(kv_cache_bytes=60 * GIB))
    assert error.value.code == "GPU_OUT_OF_MEMORY" and error.value.param == "kv_cache_memory_bytes"

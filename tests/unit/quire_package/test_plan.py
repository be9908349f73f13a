"""`quire plan`: it reproduces what was measured, grows with the load, and says what it does not know."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.__main__ import main
from quire.capacity.measured import (
    BATCHES,
    DECODE_CONTEXT,
    GPUS,
    LARGE,
    LOAD_BATCH,
    LOAD_OUTPUT,
    LOAD_PROMPT,
    SMALL,
    Gpu,
    Speeds,
)
from quire.capacity.model_sizes import ModelSizes, read_sizes
from quire.capacity.planner import Load, plan
from quire.capacity.speed_model import SpeedModel
from quire.errors import FailedPrecondition, InvalidArgument
from quire.models import find_model

MEASURED = [(gpu, model, speeds) for gpu in GPUS.values() for model, speeds in ((SMALL, gpu.small), (LARGE, gpu.large))]
LOAD = Load(requests_per_s=20, prompt_tokens=1000, output_tokens=200, ttft_ms=500, itl_ms=25)
# Sizes between and beyond the two that were measured.
MIDDLE = replace(LARGE, name="middle", hidden_size=2560, intermediate_size=9728, tied=True)
HUGE = replace(LARGE, name="huge", hidden_size=8192, intermediate_size=28_672, layers=80, heads=64)
CONFIG = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 4096}  # fmt: skip


@pytest.mark.parametrize(("gpu", "model", "speeds"), MEASURED)
def test_times_that_were_measured_are_reproduced(gpu: Gpu, model: ModelSizes, speeds: Speeds) -> None:
    speed = SpeedModel(gpu, model)
    assert speed.basis == "measured"
    assert [speed.itl_ms(batch, DECODE_CONTEXT) for batch in BATCHES] == pytest.approx(speeds.itl_ms, rel=0.01)
    assert speed.prefill_tokens_per_s() == pytest.approx(speeds.prefill_tokens_per_s, rel=0.01)
    assert speed.prompt_ms(1024) == pytest.approx(speeds.prompt_1024_ms, rel=0.01)


@pytest.mark.parametrize(("gpu", "model", "speeds"), MEASURED)
def test_a_whole_load_that_was_measured_is_estimated_within_15_percent(
    gpu: Gpu, model: ModelSizes, speeds: Speeds
) -> None:
    estimated = SpeedModel(gpu, model).requests_per_s(LOAD_PROMPT, LOAD_OUTPUT, LOAD_BATCH) * LOAD_OUTPUT
    assert 0.85 * speeds.load_tokens_per_s < estimated <= speeds.load_tokens_per_s


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_larger_models_are_slower_and_longer_contexts_too(gpu: Gpu) -> None:
    models = [SMALL, MIDDLE, LARGE, HUGE]
    assert [SpeedModel(gpu, model).basis for model in models] == [
        "measured",
        "interpolated",
        "measured",
        "extrapolated",
    ]
    for batch in BATCHES:
        times = [SpeedModel(gpu, model).itl_ms(batch, 1000) for model in models]
        assert times == sorted(times)
        assert SpeedModel(gpu, LARGE).itl_ms(batch, 8000) > SpeedModel(gpu, LARGE).itl_ms(batch, 1000)
    rates = [SpeedModel(gpu, model).prefill_tokens_per_s() for model in models]
    assert rates == sorted(rates, reverse=True)


def test_a_plan_keeps_its_limits_and_the_memory() -> None:
    found = plan(GPUS["h200"], LARGE, LOAD)
    assert found.ttft_ms <= LOAD.ttft_ms and found.itl_ms <= LOAD.itl_ms and found.busy <= 0.8
    assert found.needed_kv_tokens <= found.kv_tokens
    assert found.replicas * found.requests_per_s == pytest.approx(LOAD.requests_per_s)
    assert found.weights_gib + found.kv_gib < GPUS["h200"].memory_gib


def test_more_load_and_tighter_limits_need_more_replicas() -> None:
    base = plan(GPUS["h200"], LARGE, LOAD).replicas
    assert plan(GPUS["h200"], LARGE, replace(LOAD, requests_per_s=400)).replicas > 10 * base
    heavy = replace(LOAD, requests_per_s=400)
    assert plan(GPUS["h200"], LARGE, replace(heavy, itl_ms=7)).replicas > plan(GPUS["h200"], LARGE, heavy).replicas
    assert plan(GPUS["h100"], LARGE, heavy).replicas >= plan(GPUS["h200"], LARGE, heavy).replicas


@pytest.mark.parametrize(
    ("model", "load", "says"),
    [
        (HUGE, LOAD, "GiB of weights leave room for 0 tokens"),
        (LARGE, replace(LOAD, prompt_tokens=50_000), "longer than the model's context"),
        (LARGE, replace(LOAD, ttft_ms=5), "alone takes"),
        (LARGE, replace(LOAD, itl_ms=2), "from token to token"),
    ],
)
def test_an_impossible_plan_says_why(model: ModelSizes, load: Load, says: str) -> None:
    with pytest.raises(FailedPrecondition, match=says):
        plan(GPUS["h100"], model, load)


def test_the_command_prints_a_plan_and_what_it_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["plan", str(tmp_path), "--requests-per-s", "5"]) == 0
    shown = capsys.readouterr().out
    assert "Extrapolated beyond" in shown and "replicas" in shown and GPUS["h200"].source in shown
    assert main(["plan", str(tmp_path), "--requests-per-s", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["basis"] == "extrapolated"


@pytest.mark.parametrize(
    "change", [{"hidden_size": 0}, {"num_attention_heads": "4"}, {"vocab_size": None}, {"head_dim": True}]
)
def test_a_config_without_sizes_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(InvalidArgument, match=next(iter(change))):
        read_sizes(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '"a"', "[" * 5000])
def test_what_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidArgument, match="BAD_MODEL_SIZES"):
        read_sizes(tmp_path)


def test_model_of_the_hub_has_its_own_name_or_the_command_that_downloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"Download the model: hf download org/name"):
        read_sizes(find_model("org/name", fetch=False))
    commit = "0" * 40
    folder = tmp_path / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "model.safetensors"):
        (snapshot / name).touch()
    assert read_sizes(find_model("org/name", fetch=False)).name == "org/name"


def test_a_load_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["plan", str(tmp_path), "--requests-per-s", "nan"]) == 1
    assert "--requests-per-s" in capsys.readouterr().err

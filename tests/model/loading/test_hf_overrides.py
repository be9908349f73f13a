"""--hf-overrides: fields in place of those of config.json, for both kinds of models, and in the digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine_options import stack_flags
from quire_common.errors import ConfigError, QuireError
from quire_worker.config import WorkerConfig
from quire_worker.loading import LoadedModel, LoadOptions, load_model
from quire_worker.model_source import load_configured
from tests.gguf.tiny import TinyModel
from tests.model.folders import random_tensors, read_source, write_config, write_single


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_single(tmp_path, random_tensors(write_config(tmp_path)))
    return tmp_path


def load(model: Path, **overrides: Any) -> LoadedModel:
    return load_model(model, LoadOptions(kv_cache_bytes=1 << 20, hf_overrides=overrides))


def test_a_field_is_replaced(folder: Path) -> None:
    assert load(folder).facts.max_model_len == 512
    assert load(folder, max_position_embeddings=128).facts.max_model_len == 128
    rope = load(folder, rope_theta=5e5).spec.attention[0].rope
    assert rope is not None and rope.theta == 5e5


def test_null_removes_a_field_and_an_object_replaces_it_whole(tmp_path: Path) -> None:
    model = write_config(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0}, quantization_config={})

    def rope(**overrides: Any) -> Any:
        options = LoadOptions(load_format="dummy", hf_overrides={"quantization_config": None, **overrides})
        return read_source(model, options).spec.attention[0].rope

    assert (rope().kind, rope(rope_scaling=None).kind) == ("linear", "default")
    with pytest.raises(QuireError, match="factor"):
        rope(rope_scaling={"rope_type": "linear"})


def test_pages_of_another_configuration_are_never_shared(folder: Path) -> None:
    plain = load(folder)
    for overrides in ({"rope_theta": 5e5}, {"rms_norm_eps": 1e-3}, {"max_position_embeddings": 128}):
        other = load(folder, **overrides)
        assert other.facts.digest != plain.facts.digest, overrides
        assert other.geometry.namespace != plain.geometry.namespace, overrides
    assert load(folder, max_position_embeddings=512).facts.digest == plain.facts.digest, "the same value is the same"


def test_a_wrong_value_is_refused_by_field_and_option(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json with --hf-overrides: `num_hidden_layers` is '2'"):
        load(folder, num_hidden_layers="2")
    with pytest.raises(ConfigError, match="UNEXPECTED_TENSOR"):
        load(folder, num_hidden_layers=1)


@pytest.mark.parametrize("text", ["{", "[]", "3", '"a"', "null"])
def test_what_is_no_object_is_refused_before_anything_is_loaded(text: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="BAD_JSON_OPTION: --hf-overrides") as error:
        load_configured(WorkerConfig(model=str(folder), device="cpu", hf_overrides=text), lambda *_: None)
    assert error.value.param == "hf_overrides"


def test_the_option_reaches_the_model(folder: Path) -> None:
    config = WorkerConfig(
        model=str(folder), device="cpu", kv_cache_memory_bytes=1 << 20, hf_overrides='{"max_position_embeddings": 64}'
    )
    assert load_configured(config, lambda *_: None).info.max_model_len == 64
    flags = stack_flags({"hf_overrides": {"max_position_embeddings": 64}})
    assert flags == {service: {"hf-overrides": config.hf_overrides} for service in ("worker", "tokenizer")}


def test_a_gguf_file_takes_them_too(tmp_path: Path) -> None:
    path = TinyModel().write(tmp_path / "tiny.gguf")
    plain, other = load(path), load(path, max_position_embeddings=32)
    assert other.facts.max_model_len == 32 != plain.facts.max_model_len
    assert other.geometry.namespace != plain.geometry.namespace

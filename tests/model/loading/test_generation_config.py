"""generation_config.json: which defaults it gives, what replaces it, and the errors for values that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine_options import stack_flags
from quire_common.errors import ConfigError
from quire_worker.config import WorkerConfig
from quire_worker.model.generation_config import sampling_defaults
from quire_worker.model_source import load_configured
from tests.model.folders import random_tensors, write_config, write_single

FULL = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
    # These fields are no defaults of a request.
    "do_sample": True,
    "eos_token_id": [1, 2],
    "transformers_version": "4.51.0",
}
READ = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.0,
    "repetition_penalty": 1.05,
    "max_tokens": 2048,
}


def write(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_the_models_own_file_is_read(tmp_path: Path) -> None:
    assert dict(sampling_defaults(write(tmp_path, **FULL))) == READ
    assert sampling_defaults(tmp_path / "nowhere") == () == sampling_defaults(write(tmp_path / "empty"))
    assert sampling_defaults(write(tmp_path / "null", temperature=None)) == ()


def test_vllm_reads_nothing_and_a_folder_replaces_it(tmp_path: Path) -> None:
    model, other = write(tmp_path / "model", **FULL), write(tmp_path / "other", top_k=3)
    assert sampling_defaults(model, "vllm") == ()
    assert sampling_defaults(model, str(other)) == (("top_k", 3),)
    with pytest.raises(ConfigError, match="GENERATION_CONFIG_MISSING"):
        sampling_defaults(model, str(tmp_path / "nowhere"))


def test_the_option_wins_over_the_file(tmp_path: Path) -> None:
    override = '{"temperature": 0.5, "max_new_tokens": 7}'
    assert dict(sampling_defaults(write(tmp_path, **FULL), "auto", override)) == {
        **READ,
        "temperature": 0.5,
        "max_tokens": 7,
    }
    assert dict(sampling_defaults(tmp_path, "vllm", override)) == {"temperature": 0.5, "max_tokens": 7}


WRONG: dict[str, tuple[str, Any]] = {
    "text": ("temperature", "0.5"),
    "true": ("top_k", True),
    "a list": ("top_p", [0.5]),
    "below": ("temperature", -0.1),
    "above": ("top_p", 1.5),
    "at a bound that is refused": ("top_p", 0),
    "no penalty": ("repetition_penalty", 0.0),
    "a fraction": ("top_k", 2.5),
    "no tokens": ("max_new_tokens", 0),
    "too many": ("max_new_tokens", 2**31),
    "no number": ("min_p", float("nan")),
    "hundreds of digits": ("top_k", 10**400),
    "endless": ("temperature", float("inf")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_file_and_field(name: str, tmp_path: Path) -> None:
    field, value = WRONG[name]
    place = f"{tmp_path}/generation_config.json"
    with pytest.raises(ConfigError, match=f"BAD_GENERATION_CONFIG: {place}: `{field}`") as file:
        sampling_defaults(write(tmp_path, **{field: value}))
    assert file.value.param == "generation_config" and "--generation-config vllm" in file.value.fix
    assert sampling_defaults(tmp_path, "vllm") == (), "the way around it"
    with pytest.raises(ConfigError, match=f"BAD_GENERATION_CONFIG: --override-generation-config: `{field}`") as option:
        sampling_defaults(tmp_path, "vllm", json.dumps({field: value}))
    assert option.value.param == "override_generation_config" and "--generation-config" not in option.value.fix


@pytest.mark.parametrize(
    ("text", "code"),
    [("{", "BAD_JSON_OPTION"), ("[]", "BAD_JSON_OPTION"), ("3", "BAD_JSON_OPTION"), ("[" * 100_000, "BAD_JSON_OPTION"),
     ('{"temprature": 1}', "BAD_GENERATION_CONFIG"), ('{"max_tokens": 1}', "BAD_GENERATION_CONFIG")],
)  # fmt: skip  # a list of cases
def test_a_wrong_option_is_refused(text: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=code) as error:
        sampling_defaults(tmp_path, "auto", text)
    assert error.value.param == "override_generation_config"


def test_a_whole_number_may_be_written_as_a_fraction(tmp_path: Path) -> None:
    ((_, value),) = sampling_defaults(write(tmp_path, top_k=20.0))
    assert value == 20 and isinstance(value, int)


def test_the_worker_tells_them_and_checks_them_before_it_loads(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_single(model, random_tensors(write_config(model)))
    write(model, **FULL)
    config = WorkerConfig(model=str(model), device="cpu", kv_cache_memory_bytes=1 << 20)
    phases: list[str] = []
    served = load_configured(config, lambda phase, done, total: phases.append(phase))
    assert dict(served.info.sampling_defaults) == READ and served.info.eos_token_ids[:2] == (1, 2)
    write(model, top_p=7)
    phases.clear()
    with pytest.raises(ConfigError, match="BAD_GENERATION_CONFIG"):
        load_configured(config, lambda phase, done, total: phases.append(phase))
    assert phases == ["imports"]


def test_python_gives_an_object() -> None:
    flags = stack_flags({"override_generation_config": {"temperature": 0.5}, "generation_config": "vllm"})
    assert flags == {"worker": {"override-generation-config": '{"temperature": 0.5}', "generation-config": "vllm"}}

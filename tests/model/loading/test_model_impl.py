"""The choice between Quire's families and the Transformers backend, and the models that the backend refuses before it
reads weights, each with its cause."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_common.errors import QuireError
from quire_worker.config import WorkerConfig
from quire_worker.loading import LoadOptions, ModelImpl, find_source, load_model
from quire_worker.model.arch_spec import Attention, TransformersSpec
from quire_worker.model.architectures import FAMILIES
from quire_worker.model_source import load_configured
from quire_worker.sources.family import FamilySource
from quire_worker.transformers_backend.find_model import SUPPORTED_RELEASES
from quire_worker.transformers_backend.row_check import check_rows
from quire_worker.transformers_backend.source import TransformersSource
from tests.model.folders import write_config, write_single
from tests.oracle import quiet_transformers

ROOT = Path(__file__).resolve().parents[3]
# Every config here has these fields; each class of transformers ignores those that it does not know.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
HELIUM: dict[str, Any] = SIZES | {"architectures": ["HeliumForCausalLM"], "model_type": "helium", "head_dim": 16}
MIXTRAL: dict[str, Any] = SIZES | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
LLAMA4: dict[str, Any] = {"architectures": ["Llama4ForCausalLM"], "no_rope_layers": [1, 0]}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}


def write(folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def find(folder: Path, model_impl: ModelImpl = "auto", **options: Any) -> FamilySource | TransformersSource:
    return find_source(folder, LoadOptions(model_impl=model_impl, **options), lambda *_: None)


def refusal(folder: Path, fields: dict[str, Any], model_impl: ModelImpl = "auto", **options: Any) -> QuireError:
    with pytest.raises(QuireError) as raised:
        find(write(folder, fields), model_impl, **options)
    assert raised.value.fix
    return raised.value


def test_auto_prefers_a_family_and_falls_back_else(tmp_path: Path) -> None:
    own = write_config(tmp_path / "own")
    other = write(tmp_path / "other", MIXTRAL)
    assert isinstance(find(own), FamilySource)
    assert isinstance(find(own, "transformers"), TransformersSource)
    assert isinstance(find(other), TransformersSource)


def test_auto_leaves_what_a_family_does_not_cover_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = replace(FAMILIES["LlamaForCausalLM"], covers=lambda config: config.integer("num_hidden_layers") == 2)
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", family)
    assert isinstance(find(write_config(tmp_path / "two")), FamilySource)
    assert isinstance(find(write_config(tmp_path / "three", num_hidden_layers=3)), TransformersSource)


def test_auto_leaves_experts_to_transformers_which_quire_refuses_by_name(tmp_path: Path) -> None:
    dense = SIZES | {
        "architectures": ["AfmoeForCausalLM"],
        "model_type": "afmoe",
        "num_dense_layers": 2,
        "head_dim": 16,
    }
    experts = dense | {"num_dense_layers": 1, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    assert isinstance(find(write(tmp_path / "dense", dense)), FamilySource)
    assert isinstance(find(write(tmp_path / "experts", experts)), TransformersSource)
    error = refusal(tmp_path / "refused", experts, "quire")
    assert error.code == "UNSUPPORTED_CONFIG" and "`num_dense_layers` is 1" in error.message


def test_the_spec_is_read_from_the_modules(tmp_path: Path) -> None:
    fields = SIZES | {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 3,
        "head_dim": 32,
        "sliding_window": 21,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    spec = find(write(tmp_path, fields)).spec
    assert [each.window for each in spec.attention] == [21, 0, 21]
    assert all(each.sinks for each in spec.attention)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (4, 2, 32)
    assert (spec.vocab_size, spec.hidden_size, spec.max_positions) == (97, 64, 128)
    assert spec.attention[0].score_scale == pytest.approx(32**-0.5)


@pytest.mark.parametrize(
    ("code", "told", "fields"),
    [
        ("UNSUPPORTED_ARCHITECTURE", "no causal model", {"architectures": ["T5ForConditionalGeneration"]}),
        ("UNSUPPORTED_ARCHITECTURE", "encoder", {"architectures": ["BartForCausalLM"]}),
        ("REMOTE_CODE", "auto_map", {"architectures": ["OwnModel"], "auto_map": {"AutoModelForCausalLM": "m.Own"}}),
        ("UNSUPPORTED_LAYER_TYPE", "linear_attention", {"architectures": ["MambaForCausalLM"]}),
        ("UNSUPPORTED_LAYER_TYPE", "recurrent", {"architectures": ["RwkvForCausalLM"]}),
        ("UNSUPPORTED_LAYER_TYPE", "conv", {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "conv"]}),
        ("UNSUPPORTED_CACHE", "MiniMaxCache", {"architectures": ["MiniMaxForCausalLM"]}),
        ("UNSUPPORTED_ATTENTION", "latent", {"architectures": ["DeepseekV3ForCausalLM"], **LATENT}),
        ("UNSUPPORTED_ATTENTION", "AttentionInterface", {"architectures": ["OpenAIGPTLMHeadModel"]}),
        ("UNSUPPORTED_ATTENTION", "layers 0, 0, 1, 1", {"architectures": ["DiffLlamaForCausalLM"]}),
        ("UNSUPPORTED_ATTENTION", "later positions", {"architectures": ["BertLMHeadModel"]}),
        (
            "UNSUPPORTED_ATTENTION",
            "counts the rows",
            LLAMA4,
        ),
        ("BAD_CONFIG", "model_type", {"architectures": ["HeliumForCausalLM"], "model_type": "mamba"}),
    ],
)
def test_what_transformers_may_not_compute_is_refused_by_name(
    code: str, told: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    error = refusal(tmp_path, SIZES | fields)
    assert error.code == code
    assert told in str(error)


def test_quire_refuses_what_has_no_family(tmp_path: Path) -> None:
    assert refusal(tmp_path, MIXTRAL, "quire").code == "UNSUPPORTED_ARCHITECTURE"


def test_a_long_rope_is_refused_beyond_its_original_context(tmp_path: Path) -> None:
    fields = SIZES | {"architectures": ["Phi3ForCausalLM"], "rope_parameters": LONGROPE, "pad_token_id": 0}
    fields["original_max_position_embeddings"] = 64
    error = refusal(tmp_path, fields, "transformers")
    assert (error.code, "--max-model-len 64" in error.fix) == ("UNSUPPORTED_ROPE", True)
    assert find(tmp_path, "transformers", max_model_len=64).max_model_len == 64


def test_without_transformers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = refusal(tmp_path, HELIUM)
    assert (error.code, f"pip install '{SUPPORTED_RELEASES}'" in error.fix) == ("TRANSFORMERS_MISSING", True)
    extras = tomllib.loads((ROOT / "services/worker/pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["transformers"] == [SUPPORTED_RELEASES], "pip installs the same"
    assert SUPPORTED_RELEASES in (ROOT / "docs/models.md").read_text()


@pytest.mark.parametrize(
    ("code", "options"), [("DTYPE", {"dtype": "bfloat16"}), ("QUANTIZATION", {"quantize": "int8"})]
)
def test_weights_of_other_types_need_a_family(code: str, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(QuireError) as raised:
        load_model(write(tmp_path, HELIUM), LoadOptions(load_format="dummy", **options))
    assert raised.value.code == f"UNSUPPORTED_{code}"


def test_batch_invariance_is_not_promised(tmp_path: Path) -> None:
    config = WorkerConfig(
        model=str(write(tmp_path, HELIUM)), load_format="dummy", device="cpu", kv_cache_memory_bytes=4 << 20,
        torch_threads=1,
    )  # fmt: skip  # the flags of a worker
    served = load_configured(config, lambda *_: None)
    assert "greedy" in served.info.capabilities
    assert "batch_invariant" not in served.info.capabilities
    assert served.work is None
    with pytest.raises(QuireError) as raised:
        load_configured(replace(config, batch_invariant=True), lambda *_: None)
    assert raised.value.code == "NOT_BATCH_INVARIANT"


def tensors_of(fields: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of a Helium."""
    with quiet_transformers():
        from transformers import HeliumConfig, HeliumForCausalLM

        model = HeliumForCausalLM(HeliumConfig(**{name: fields[name] for name in (*SIZES, "head_dim")}))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    sound, name = tensors_of(HELIUM), "model.layers.1.self_attn.o_proj.weight"
    write(tmp_path, HELIUM)
    for code, tensors in (
        ("MISSING_TENSOR", {key: value for key, value in sound.items() if key != name}),
        ("UNEXPECTED_TENSOR", sound | {"model.layers.7.self_attn.o_proj.weight": torch.ones(3)}),
        ("SHAPE_MISMATCH", sound | {name: torch.ones(64, 48)}),
        ("UNSUPPORTED_WEIGHT_DTYPE", sound | {name: torch.ones(64, 64, dtype=torch.int64)}),
    ):
        write_single(tmp_path, tensors)
        with pytest.raises(QuireError) as raised:
            load_model(tmp_path, LoadOptions(kv_cache_bytes=4 << 20))
        assert raised.value.code == code
        assert "o_proj" in str(raised.value)


def test_nothing_is_unpickled_and_no_code_of_the_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    write(tmp_path, HELIUM | {"auto_map": {"AutoModelForCausalLM": "modeling.Own", "AutoConfig": "modeling.Own"}})
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(QuireError) as raised:
        load_model(tmp_path, LoadOptions(kv_cache_bytes=4 << 20))
    assert raised.value.code == "UNSUPPORTED_WEIGHT_FORMAT"
    write_single(tmp_path, tensors_of(HELIUM))
    load_model(tmp_path, LoadOptions(kv_cache_bytes=4 << 20))
    assert not ran.exists()


SHIFTS = TransformersSpec("Shifts", 97, 4, 128, (Attention(1, 1, 4),))


class Rows:
    """Stands for a model without attention whose row r is a number of its own, or mixed with the row before."""

    def __init__(self, *, shifts: bool) -> None:
        self.shifts = shifts

    def hidden(self, token: Tensor, position: Tensor | None) -> Tensor:
        position = torch.arange(len(token)) if position is None else position
        rows = (token + position)[:, None].float().expand(-1, 4)
        return rows + rows.roll(1, 0) if self.shifts else rows


def test_a_model_that_mixes_rows_is_refused() -> None:
    check_rows(SHIFTS, Rows(shifts=False), torch.device("cpu"))
    with pytest.raises(QuireError, match="depends on rows of other sequences"):
        check_rows(SHIFTS, Rows(shifts=True), torch.device("cpu"))


class Failing(Rows):
    """Stands for a model whose code fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__(shifts=False)
        self.error = error

    def hidden(self, token: Tensor, position: Tensor | None) -> Tensor:
        raise self.error


def test_a_model_whose_code_fails_is_refused() -> None:
    with pytest.raises(QuireError, match="IndexError: index out of range") as raised:
        check_rows(SHIFTS, Failing(IndexError("index out of range")), torch.device("cpu"))
    assert raised.value.code == "UNSUPPORTED_ATTENTION"


def test_a_model_that_lacks_memory_is_not_refused_for_its_code() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        check_rows(SHIFTS, Failing(torch.OutOfMemoryError()), torch.device("cpu"))


@pytest.mark.parametrize("architecture", ["RobertaForCausalLM", "XLMRobertaForCausalLM", "CamembertForCausalLM"])
def test_a_model_whose_first_position_is_not_0_is_refused(architecture: str, tmp_path: Path) -> None:
    folder = write(tmp_path, SIZES | {"architectures": [architecture], "is_decoder": True})
    with pytest.raises(QuireError, match="first position is not 0"):
        load_model(folder, LoadOptions(load_format="dummy", kv_cache_bytes=4 << 20))


def test_a_model_that_takes_a_view_of_its_attention_is_served(tmp_path: Path) -> None:
    fields = {"architectures": ["AfmoeForCausalLM"], "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    folder = write(tmp_path, SIZES | fields)
    assert load_model(folder, LoadOptions(load_format="dummy", kv_cache_bytes=4 << 20)).runner

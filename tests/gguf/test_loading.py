"""The worker's reading of GGUF models: as transformers reads the same file, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from quire_common.errors import ConfigError, QuireError
from quire_worker.loading import LoadedModel, LoadFormat, LoadOptions, load_model
from quire_worker.model.arch_spec import ArchSpec, RopeSpec
from quire_worker.model.rope import inverse_frequencies
from tests.gguf.tiny import HIDDEN, TinyModel, Weights
from tests.model.batches import PAGE_SIZE, Run, make_batch
from tests.model.folders import read_source, write_config
from tests.oracle import Oracle, quiet_transformers

LOGIT_TOLERANCE = 1e-4
KINDS = GGMLQuantizationType
TINY: dict[str, TinyModel] = {
    "llama": TinyModel(),
    "llama, tied": TinyModel(tied=True, kind=KINDS.Q8_0),
    "llama, wide heads": TinyModel(head_dim=16, kind=KINDS.F16),
    "qwen2": TinyModel("qwen2", kind=KINDS.Q4_1),
    "qwen2, tied": TinyModel("qwen2", tied=True, kind=KINDS.Q5_0),
    # transformers takes heads of 128 for granted.
    "qwen3": TinyModel("qwen3", head_dim=128, kind=KINDS.Q4_0),
    "qwen3, tied": TinyModel("qwen3", head_dim=128, tied=True, kind=KINDS.BF16),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def load(path: Path) -> LoadedModel:
    return load_model(path, LoadOptions(kv_cache_bytes=4 << 20))


def rope_of(spec: ArchSpec) -> RopeSpec:
    rope = spec.attention[0].rope
    assert rope is not None
    return rope


def read_spec(path: Path) -> ArchSpec:
    return read_source(path).spec


@pytest.mark.parametrize("name", TINY)
def test_logits_are_transformers_of_the_same_file(name: str, tmp_path: Path) -> None:
    path = TINY[name].write(tmp_path / "tiny.gguf")
    model, oracle = load(path), Oracle(path)
    for length in (1, 40):
        tokens = np.random.default_rng(length).integers(0, model.spec.vocab_size, length).tolist()
        found = model.runner.all_logits(make_batch([Run(tokens, 0, list(range(1, 2 + length // PAGE_SIZE)))]))
        wanted = oracle.logits(tokens)
        assert wanted.abs().max() > 0.5, "logits too small to mean anything"
        assert (found - wanted).abs().max() < LOGIT_TOLERANCE
    assert model.facts.eos_token_ids == (2, 5)


def test_the_digest_follows_weights_and_config(tmp_path: Path) -> None:
    def nudged(weights: Weights) -> None:
        weights["blk.1.ffn_up.weight"][0, 0] += 1

    digests = {
        load(model.write(tmp_path / f"{number}.gguf")).facts.digest
        for number, model in enumerate(
            (
                TinyModel(),
                TinyModel(),
                TinyModel(change=nudged),
                TinyModel(fields={"rope.freq_base": 1e4}),
            )
        )
    }
    assert len(digests) == 3


def test_rope_factors_are_llama_3s(tmp_path: Path) -> None:
    """llama.cpp's converter writes Llama 3's RoPE as one divisor for each frequency, by its own formula."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    base, factor, low, high, old = 500000.0, 8.0, 1.0, 4.0, 64
    plain = inverse_frequencies(RopeSpec(theta=base), 64).double().numpy()
    lengths = 2 * np.pi / plain
    smooth = (old / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(lengths < old / high, 1.0, np.where(lengths > old / low, factor, between)).astype(np.float32)
    assert len({*factors.tolist()}) > 4
    model = TinyModel(
        head_dim=64,
        fields={"rope.freq_base": base},
        change=lambda weights: weights.update({"rope_freqs.weight": factors}),
    )
    spec = read_spec(model.write(tmp_path / "tiny.gguf"))
    rope = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": old,
    }
    with quiet_transformers():
        config = LlamaConfig(hidden_size=512, num_attention_heads=8, head_dim=64, rope_parameters=rope)
        wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert torch.allclose(inverse_frequencies(rope_of(spec), 64), wanted, rtol=1e-5, atol=0)


def test_linear_rope_is_read(tmp_path: Path) -> None:
    model = TinyModel(fields={"rope.scaling.type": "linear", "rope.scaling.factor": 3.0})
    rope = rope_of(read_spec(model.write(tmp_path / "tiny.gguf")))
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 3.0, 5000.0)


@pytest.mark.parametrize(
    ("fields", "kind", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, "linear", 4.0),
        ({"rope.scaling.factor": 1.0}, "default", 1.0),
        ({"rope.scaling.factor": 0.0}, "default", 1.0),
        ({"rope.scaling.type": "linear"}, "default", 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "default", 1.0),
    ],
)
def test_rope_scaling_has_llama_cpps_defaults(
    fields: dict[str, float | str], kind: str, factor: float, tmp_path: Path
) -> None:
    rope = rope_of(read_spec(TinyModel(fields=fields).write(tmp_path / "tiny.gguf")))
    assert (rope.kind, rope.factor) == (kind, factor)


def without(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(name)


def with_tensor(name: str, *shape: int) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: np.ones(shape, np.float32)})


REFUSED: dict[str, tuple[TinyModel, str, str]] = {
    "architecture": (TinyModel("gptj"), "UNSUPPORTED_ARCHITECTURE", "gptj"),
    "unread key": (TinyModel(fields={"attention.sliding_window": 64}), "UNSUPPORTED_CONFIG", "sliding_window"),
    "new key": (TinyModel(fields={"attention.novelty": 1.0}), "UNSUPPORTED_CONFIG", "attention.novelty"),
    "experts": (TinyModel(fields={"expert_count": 8}), "UNSUPPORTED_CONFIG", "expert_count"),
    "experts of each layer": (TinyModel(fields={"expert_count": [0, 0, 0]}), "UNSUPPORTED_CONFIG", "3 int32 values"),
    "a list of layouts": (TinyModel(fields={"tensor_data_layout": ["", ""]}), "UNSUPPORTED_CONFIG", "2 texts"),
    "partial RoPE": (TinyModel(fields={"rope.dimension_count": 4}), "UNSUPPORTED_CONFIG", "rope.dimension_count"),
    "other values": (TinyModel(fields={"attention.value_length": 4}), "UNSUPPORTED_CONFIG", "value_length"),
    "dynamic RoPE": (TinyModel(fields={"rope.scaling.type": "dynamic"}), "UNSUPPORTED_ROPE", "dynamic"),
    "yarn with another scale": (
        TinyModel(fields={"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.5}),
        "UNSUPPORTED_CONFIG",
        "rope.scaling.attn_factor",
    ),
    "longrope of one list": (
        TinyModel(change=with_tensor("rope_factors_long.weight", 4)),
        "BAD_GGUF_METADATA",
        "rope_factors_short",
    ),
    "yarn with longrope's lists": (
        TinyModel(
            fields={"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
            change=with_tensor("rope_factors_short.weight", 4),
        ),
        "UNSUPPORTED_ROPE",
        "rope_factors_short",
    ),
    "billions of layers": (TinyModel(fields={"block_count": 4_000_000_000}), "BAD_GGUF_METADATA", "block_count"),
    "a pattern of another length": (
        TinyModel(
            "exaone4",
            fields={"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False]},
        ),
        "BAD_CONFIG",
        "sliding_window_pattern",
    ),
    "no epsilon": (
        TinyModel(fields={"attention.layer_norm_rms_epsilon": None}),
        "BAD_GGUF_METADATA",
        "layer_norm_rms_epsilon",
    ),
    "MiniCPM without scales": (
        TinyModel("minicpm", fields={"embedding_scale": 12.0, "residual_scale": 0.2}),
        "BAD_GGUF_METADATA",
        "minicpm.logit_scale",
    ),
    "no layers": (TinyModel(fields={"block_count": None}), "BAD_GGUF_METADATA", "block_count"),
    "zero heads": (TinyModel(fields={"attention.head_count": 0}), "BAD_GGUF_METADATA", "head_count"),
    "a vocabulary of another size": (TinyModel(fields={"vocab_size": 7}), "BAD_GGUF_METADATA", "vocab_size"),
    "missing tensor": (TinyModel(change=without("blk.1.attn_k.weight")), "MISSING_TENSOR", "blk.1.attn_k.weight"),
    "no embedding": (TinyModel(change=without("token_embd.weight")), "MISSING_TENSOR", "token_embd.weight"),
    "left over": (TinyModel(change=with_tensor("blk.0.ffn_gate_inp.weight", 4)), "UNEXPECTED_TENSOR", "gate_inp"),
    "more layers": (TinyModel(fields={"block_count": 2}), "UNEXPECTED_TENSOR", "blk.2."),
    "wrong shape": (TinyModel(change=with_tensor("blk.0.attn_q.weight", 8, HIDDEN)), "SHAPE_MISMATCH", "attn_q"),
    "RoPE factors of another head": (TinyModel(change=with_tensor("rope_freqs.weight", 3)), "UNSUPPORTED_ROPE", "rope"),
    "kind of blocks": (TinyModel(kind=KINDS.MXFP4), "UNSUPPORTED_WEIGHT_DTYPE", "MXFP4"),
}


WINDOW = "attention.sliding_window"
EPS: dict[str, float | None] = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("gemma2", {"final_logit_softcapping": 0.0}),
        ("gemma2", {"attn_logit_softcapping": 0.0}),
        ("gemma2", {WINDOW: 0}),
        ("olmo2", {WINDOW: 0}),
        ("command-r", EPS | {"logit_scale": 0.0}),
        ("cohere2", EPS | {WINDOW: 9, "logit_scale": 0.0}),
        ("cohere2", EPS | {WINDOW: 0, "logit_scale": 0.5}),
    ],
)
def test_a_zero_never_becomes_the_default_of_a_family(
    architecture: str, fields: dict[str, float | None], tmp_path: Path
) -> None:
    (key,) = (key for key, value in fields.items() if value == 0)
    with pytest.raises(QuireError, match=f"UNSUPPORTED_CONFIG.*{architecture}.{key}"):
        read_spec(TinyModel(architecture, fields=fields).write(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    model, code, word = REFUSED[name]
    with pytest.raises(QuireError) as error:
        load(model.write(tmp_path / "tiny.gguf"))
    assert error.value.code == code and word in error.value.message + error.value.param and error.value.fix


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention.head_count_kv": 3}, "`llama.attention.head_count_kv` is 3, not a divisor of llama.attention.head"),
        ({"rope.scaling.factor": -2.0}, "`llama.rope.scaling.factor` is -2.0"),
        ({"attention.head_count": 5, "rope.dimension_count": None, "attention.head_count_kv": 5}, "`head_dim`"),
    ],
)
def test_bad_config_names_the_gguf_file_and_its_keys(fields: dict[str, float], words: str, tmp_path: Path) -> None:
    model = TinyModel(fields=fields)
    if "attention.head_count" in fields:
        model.fields["embedding_length"] = 35
    path = model.write(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match="BAD_CONFIG") as error:
        read_spec(path)
    assert words in error.value.message and str(path) in error.value.message
    assert str(path) in error.value.fix and "config.json" not in error.value.message + error.value.fix


def test_folder_of_gguf_files_is_answered_with_the_name_of_one(tmp_path: Path) -> None:
    TinyModel().write(tmp_path / "model-Q4_0.gguf")
    wanted = f"Name one: `--model {tmp_path / 'model-Q4_0.gguf'}`."
    with pytest.raises(ConfigError, match="MISSING_CONFIG") as error:
        load(tmp_path)
    assert error.value.fix == wanted and "This folder holds GGUF files." in error.value.message
    write_config(tmp_path)
    with pytest.raises(ConfigError, match="UNSUPPORTED_WEIGHT_FORMAT") as error:
        load(tmp_path)
    assert error.value.fix == wanted and "This folder holds GGUF files." in error.value.message


def test_load_format_names_the_format_that_the_model_has(tmp_path: Path) -> None:
    path = TinyModel().write(tmp_path / "tiny.gguf")
    write_config(tmp_path)
    assert load_model(path, LoadOptions("gguf", kv_cache_bytes=4 << 20)).facts.eos_token_ids == (2, 5)
    for model, load_format in ((path, "safetensors"), (tmp_path, "gguf")):
        with pytest.raises(ConfigError, match="LOAD_FORMAT_MISMATCH") as error:
            load_model(model, LoadOptions(cast("LoadFormat", load_format)))
        assert f"--load-format {load_format}" in error.value.message and error.value.param == "load_format"
    assert f"--model {path}" in error.value.fix


def test_pieces_of_rows_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dataclasses.replace(TINY["llama, tied"]).write(tmp_path / "tiny.gguf")
    whole = load(path)
    monkeypatch.setattr("quire_worker.weights.gguf.tensor_values.PIECE_VALUES", 100)
    parts = load(path)
    batch = make_batch([Run(list(range(20)), 0, [1, 2])])
    assert torch.equal(whole.runner.all_logits(batch), parts.runner.all_logits(batch))
    assert whole.facts.digest == parts.facts.digest

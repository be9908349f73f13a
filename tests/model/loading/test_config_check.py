"""Fields of config.json that ask for what no supported family computes are refused by name; real configs load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire_common.errors import ConfigError, QuireError, Unsupported
from quire_worker.loading import LoadOptions
from quire_worker.model.arch_spec import ArchSpec
from tests.model.folders import TINY, read_source, write_config

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Windows of the tiny folders, which have 512 positions and two layers.
WINDOW = {"use_sliding_window": True, "sliding_window": 37}


def spec_of(folder: Path, **fields: Any) -> ArchSpec:
    return read_source(write_config(folder, **fields), LoadOptions(load_format="dummy")).spec


GEMMA2: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
PHI: dict[str, Any] = {"architectures": ["PhiForCausalLM"], "model_type": "phi", "rms_norm_eps": ...}
STABLELM: dict[str, Any] = {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "rms_norm_eps": ...}
NO_SIZES: dict[str, Any] = dict.fromkeys(TINY, ...) | {"vocab_size": 97}
OPT: dict[str, Any] = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "rms_norm_eps": ...}
MPT: dict[str, Any] = NO_SIZES | {"architectures": ["MptForCausalLM"], "d_model": 48, "n_heads": 4, "n_layers": 2}
MPT |= {"max_seq_len": 64}
GPT2: dict[str, Any] = NO_SIZES | {"architectures": ["GPT2LMHeadModel"], "n_embd": 48, "n_head": 4, "n_layer": 2}
GPT2 |= {"n_positions": 64}
OLMO3: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "layer_types": ["full_attention"] * 2,
}
AFMOE: dict[str, Any] = {"architectures": ["AfmoeForCausalLM"], "model_type": "afmoe"}
QWEN3_NEXT: dict[str, Any] = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
QWEN3_NEXT |= {"head_dim": 32, "layer_types": ["full_attention"] * 2, "num_experts": 0}
HUNYUAN: dict[str, Any] = {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"}
ALPHA = {"rope_type": "dynamic", "alpha": 100.0}
# Keys of published config.json files, where they matter.
REAL: dict[str, dict[str, Any]] = {
    "llama-2": LLAMA | {"pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False},
    "llama-3.1": LLAMA | {"attention_bias": False, "mlp_bias": False, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama, new": LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "rope_theta": 500000.0},
    "hunyuan": HUNYUAN
    | {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "dynamic",
            "alpha": 1000.0,
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "qwen2.5": QWEN2 | {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28},
    "qwen2": QWEN2 | {"use_sliding_window": False, "sliding_window": 256, "max_window_layers": 1},
    "qwen3": QWEN3 | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 1},
    "qwen3, new": QWEN3 | {"layer_types": ["full_attention"] * 2, "attention_bias": False},
    "a window that is as long as the context": QWEN2 | {"sliding_window": 512},
    "a window that is longer than the context": LLAMA | {"sliding_window": 4096},
    "afmoe, all dense": AFMOE | {"num_dense_layers": 2, "layer_types": ["full_attention"] * 2, "sliding_window": 2048},
    "qwen3-next, all dense": QWEN3_NEXT | {"num_experts": 4, "mlp_only_layers": [0, 1]},
    "qwen3-next, all full": QWEN3_NEXT | {"layer_types": ..., "full_attention_interval": 1},
    "neutral": LLAMA | {"logit_scale": 1.0, "attn_logit_softcapping": None, "num_experts": 0, "use_qk_norm": False},
}


@pytest.mark.parametrize("name", REAL)
def test_what_is_supported_loads(name: str, tmp_path: Path) -> None:
    assert not any(spec_of(tmp_path, **REAL[name]).windows)


def test_windows_are_those_of_the_families_own_defaults(tmp_path: Path) -> None:
    assert spec_of(tmp_path, **QWEN2, **WINDOW, max_window_layers=1).windows == (0, 37)
    assert spec_of(tmp_path, **QWEN3, **WINDOW, layer_types=["sliding_attention", "full_attention"]).windows == (37, 0)
    deep = spec_of(tmp_path, **QWEN2, **WINDOW, num_hidden_layers=30)
    assert deep.windows == (0,) * 28 + (37, 37)


def test_null_is_no_soft_cap_where_absence_is_the_default(tmp_path: Path) -> None:
    for fields, caps in (
        ({}, (50.0, 30.0)),
        ({"attn_logit_softcapping": None}, (0.0, 30.0)),
        ({"final_logit_softcapping": None}, (50.0, 0.0)),
    ):
        spec = spec_of(tmp_path, **GEMMA2, **fields)
        assert (spec.attention[0].softcap, spec.logit_softcap) == caps
        options = LoadOptions(load_format="dummy", hf_overrides=fields)
        spec = read_source(write_config(tmp_path, **GEMMA2), options).spec
        assert (spec.attention[0].softcap, spec.logit_softcap) == caps, "an option says it as the file does"


def test_null_says_what_transformers_takes_it_for(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, **(LLAMA | {"num_key_value_heads": None, "head_dim": None, "layer_types": None}))
    assert (spec.kv_heads, spec.head_dim) == (4, 12)
    seed = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "head_dim": None}
    assert spec_of(tmp_path, **seed).head_dim == 12, "not the family's 128"
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for truncate, rounds in ((None, False), (True, True)):
        (rope,) = {
            each.rope for each in spec_of(tmp_path, **LLAMA, rope_scaling=yarn | {"truncate": truncate}).attention
        }
        assert rope is not None and rope.truncate is rounds


def test_a_familys_own_name_of_a_field_does_not_hide_the_usual_one(tmp_path: Path) -> None:
    assert spec_of(tmp_path, **(GPT2 | {"n_embd": None, "hidden_size": 48})).hidden_size == 48


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a window that is null, in layers that have one": (GEMMA2 | {"sliding_window": None}, "sliding_window"),
    "an epsilon that is null": (LLAMA | {"rms_norm_eps": None}, "rms_norm_eps"),
    "an activation that is null": (LLAMA | {"hidden_act": None}, "hidden_act"),
    "a scale of scores that is null": (GEMMA2 | {"query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
    "a bias that is null": (LLAMA | {"attention_bias": None}, "attention_bias"),
    "a part of a head that is null, where the family has one": (
        PHI | {"partial_rotary_factor": None},
        "partial_rotary_factor",
    ),
    "a window that is null, in layers by name": (
        QWEN2 | {"use_sliding_window": True, "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
        "sliding_window",
    ),
    "window without a flag": (QWEN2 | {"sliding_window": 37}, "sliding_window"),
    "window without a flag, qwen3": (QWEN3 | {"sliding_window": 37}, "sliding_window"),
    "flag without a window": (QWEN2 | {"use_sliding_window": True}, "sliding_window"),
    "layers without a flag": (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "window of a llama": (LLAMA | {"sliding_window": 37}, "sliding_window"),
    "layers of a llama": (LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "chunks": (LLAMA | {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
    "linear layers": (QWEN3 | {"layer_types": ["linear_attention"] * 2}, "layer_types"),
    "another type": (LLAMA | {"model_type": "granite"}, "model_type"),
    "softcap": (LLAMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "final softcap": (QWEN3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "logit scale": (LLAMA | {"logit_scale": 0.0625}, "logit_scale"),
    "granite": (LLAMA | {"logits_scaling": 8.0}, "logits_scaling"),
    "embeddings": (LLAMA | {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    "residuals": (LLAMA | {"residual_multiplier": 0.22}, "residual_multiplier"),
    "scores": (LLAMA | {"attention_multiplier": 0.015625}, "attention_multiplier"),
    "minicpm": (LLAMA | {"scale_emb": 12}, "scale_emb"),
    "partial": (LLAMA | {"rotary_pct": 0.25}, "rotary_pct"),
    "neighbours": (LLAMA | {"rope_interleave": True}, "rope_interleave"),
    "no positions": (LLAMA | {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    "two bases": (LLAMA | {"rope_local_base_freq": 10000.0}, "rope_local_base_freq"),
    "alibi": (LLAMA | {"alibi": True}, "alibi"),
    "query norms": (LLAMA | {"use_qk_norm": True}, "use_qk_norm"),
    "experts": (QWEN3 | {"num_experts": 128}, "num_experts"),
    "latent": (LLAMA | {"kv_lora_rank": 512}, "kv_lora_rank"),
    "biases": (LLAMA | {"bias": True}, "bias"),
    "both ways": (LLAMA | {"is_causal": False}, "is_causal"),
    "long context": (QWEN2 | {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
    "another norm": (LLAMA | {"rms_norm_eps": ..., "layer_norm_eps": 1e-5}, "layer_norm_eps"),
    "rope by layer": (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
    "rope of more": (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "beta_fast"),
    "rope, axes": (QWEN2 | {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, "mrope_section"),
    "two ropes": (
        LLAMA | {"rope_parameters": LLAMA3, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling",
    ),
    "an unread field of attention": (LLAMA | {"attention_window_of_my_own": 12}, "attention_window_of_my_own"),
    "a field of another family": (LLAMA | {"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
    "sparse layers": (LLAMA | {"qk_sparse": True}, "qk_sparse"),
    "gemma, both ways": (
        LLAMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "use_bidirectional_attention": True},
        "use_bidirectional_attention",
    ),
    "opt 350m": (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before"),
    "opt, a narrow embedding": (OPT | {"word_embed_proj_dim": 24}, "word_embed_proj_dim"),
    "mpt, biases": (MPT | {"no_bias": False}, "no_bias"),
    "mpt, learned positions": (MPT | {"attn_config": {"alibi": False}}, "alibi"),
    "stablelm, a norm for each head": (
        STABLELM | {"qk_layernorm": True},
        "qk_layernorm",
    ),
    "gpt2, scaled by layer": (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    "two kinds": (LLAMA | {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}, "type"),
    "olmo 3, a base of old files": (OLMO3 | {"rope_theta": 1e4}, "rope_theta"),
    "olmo 3, a scaled rope for all layers": (
        OLMO3 | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        "rope_parameters",
    ),
    "olmo 3, a base beside types of layers without one": (
        OLMO3
        | {
            "rope_theta": 1e4,
            "rope_parameters": {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")},
        },
        "rope_theta",
    ),
    "olmo 3, a type of old files": (OLMO3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    "afmoe, experts": (AFMOE | {"num_dense_layers": 1}, "num_dense_layers"),
    "afmoe, experts by default": (AFMOE, "num_dense_layers"),
    "qwen3-next, experts": (QWEN3_NEXT | {"num_experts": 4, "mlp_only_layers": [1]}, "num_experts"),
    "qwen3-next, experts by default": (QWEN3_NEXT | {"num_experts": ...}, "num_experts"),
    "qwen3-next, linear attention": (
        QWEN3_NEXT | {"layer_types": ["linear_attention", "full_attention"]},
        "layer_types",
    ),
    "qwen3-next, linear attention by default": (QWEN3_NEXT | {"layer_types": ...}, "layer_types"),
    "qwen3-next, windows": (QWEN3_NEXT | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "qwen3-next, biases": (QWEN3_NEXT | {"attention_bias": True}, "attention_bias"),
    "hunyuan, no alpha": (HUNYUAN | {"rope_scaling": {"rope_type": "dynamic"}}, "rope_type"),
    "hunyuan, no alpha, old": (HUNYUAN | {"rope_scaling": {"type": "dynamic"}}, "type"),
    "hunyuan, a part rotates": (
        HUNYUAN | {"rope_parameters": ALPHA | {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "hunyuan, two thetas": (
        HUNYUAN | {"rope_parameters": ALPHA | {"rope_theta": 1e6}, "rope_theta": 1e4},
        "rope_theta",
    ),
    "hunyuan, two kinds": (
        HUNYUAN | {"rope_parameters": ALPHA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling",
    ),
    "two thetas": (LLAMA | {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4}, "rope_theta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_name(name: str, tmp_path: Path) -> None:
    fields, key = REFUSED[name]
    with pytest.raises(QuireError) as raised:
        spec_of(tmp_path, **fields)
    error = raised.value
    assert error.code in ("UNSUPPORTED_CONFIG", "UNSUPPORTED_LAYER_TYPE", "BAD_CONFIG") and error.fix
    assert f"`{key}`" in error.message or error.param == key
    assert isinstance(error, Unsupported) or error.code == "BAD_CONFIG"


@pytest.mark.parametrize("kind", ["dynamic", "mrope", "ntk", "proportional"])
def test_another_rope_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=f"UNSUPPORTED_ROPE: RoPE variant '{kind}'"):
        spec_of(tmp_path, **LLAMA, rope_scaling={"type": kind, "factor": 4.0})


# Fields, and the field that the error names.
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "heads that do not divide the model": (LLAMA | {"hidden_size": 50}, "hidden_size"),
    "KV heads that do not divide the heads": (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
    "odd heads": (LLAMA | {"head_dim": 15}, "head_dim"),
    "no layers": (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers"),
    "layers that are not numbers": (LLAMA | {"num_hidden_layers": "2"}, "num_hidden_layers"),
    "fewer types than layers": (LLAMA | {"layer_types": ["full_attention"]}, "layer_types"),
    "no context": (LLAMA | {"max_position_embeddings": ...}, "max_position_embeddings"),
    "more than a head rotates": (LLAMA | {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    "an odd part of a head rotates": (LLAMA | {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    "no factor": (LLAMA | {"rope_scaling": {"rope_type": "yarn"}}, "factor"),
    "factors of another head": (
        LLAMA | {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "factor": 2.0}},
        "factors",
    ),
    "no long factors": (
        LLAMA | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "factor": 2.0}},
        "0 factors for 6 pairs",
    ),
    "own names": (GPT2 | {"n_head": 5}, "n_embd"),
    "rotates more than a head": (
        GPT2 | {"architectures": ["GPTJForCausalLM"], "rotary_dim": 64},
        "rotary_dim",
    ),
    "too few layers with a rotary embedding": (
        LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1]},
        "no_rope_layers",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictory_sizes_are_refused_by_the_files_own_name(name: str, tmp_path: Path) -> None:
    fields, key = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=key) as raised:
        spec_of(tmp_path, **fields)
    assert raised.value.code == "BAD_CONFIG" and raised.value.fix


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "MambaForCausalLM", "InternLM2ForCausalLM", ""])
def test_an_unknown_architecture_is_refused_with_those_that_are_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"UNSUPPORTED_ARCHITECTURE.*LlamaForCausalLM"):
        spec_of(tmp_path, architectures=[name])


def test_fields_of_other_names_are_read_as_the_usual_ones(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, **GPT2)
    assert (spec.hidden_size, spec.heads, len(spec.layers), spec.max_positions) == (48, 4, 2, 64)
    assert spec.intermediate_size == 4 * 48 and spec.tied_embeddings

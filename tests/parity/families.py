"""A tiny random model of each family, written by transformers itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import quiet_transformers

_ROOT = Path(__file__).resolve().parents[2]
_THIRDS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_KV: dict[str, Any] = {"num_key_value_heads": ...}
GPT: dict[str, Any] = dict.fromkeys(SIZES, ...) | {
    "vocab_size": 131,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 96,
}
_WINDOW: dict[str, Any] = {"sliding_window": 21}
_PART: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}
_ALIBI: dict[str, Any] = {"alibi": True, "new_decoder_architecture": False, "parallel_attn": False}
_FALCON = NO_KV | {"intermediate_size": ..., "num_attention_heads": 4}

# Name of a case -> the family's name in transformers, and fields of its config; ... leaves one out.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama, heads of 80": ("Llama", {"head_dim": 80}),
    "mistral": ("Mistral", _WINDOW),
    "ministral": (
        "Ministral",
        _WINDOW | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3, windows": ("SmolLM3", _WINDOW | {"no_rope_layers": [1, 0, 1], "use_sliding_window": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", _WINDOW | {"head_dim": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", _WINDOW | {"head_dim": 256, "query_pre_attn_scalar": 1024, "num_hidden_layers": 6}),
    "phi": ("Phi", NO_KV | {"qk_layernorm": True}),
    "phi3": ("Phi3", _WINDOW),
    "phi3, longrope": (
        "Phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64, "tie_word_embeddings": True},
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "olmo": ("Olmo", {"clip_qkv": 1.5}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", _WINDOW | {"num_hidden_layers": 4}),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 1.5}),
    "cohere2": ("Cohere2", _WINDOW | {"num_hidden_layers": 4, "logit_scale": 1.5}),
    "starcoder2": ("Starcoder2", _WINDOW),
    "gpt2": ("GPT2", GPT),
    "gpt-neox": ("GPTNeoX", NO_KV),
    "gpt-neox, one after the other": ("GPTNeoX", NO_KV | {"use_parallel_residual": False}),
    "gptj": ("GPTJ", GPT | {"rotary_dim": 8}),
    "opt": ("OPT", NO_KV | {"intermediate_size": ..., "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "bloom": ("Bloom", dict.fromkeys(SIZES, ...) | {"vocab_size": 131, "hidden_size": 64, "n_layer": 3, "n_head": 4}),
    "falcon 7b": ("Falcon", _FALCON | {"multi_query": True}),
    "falcon 40b": ("Falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "Falcon",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon rw": ("Falcon", _FALCON | _ALIBI | {"multi_query": False, "bias": True}),
    "mpt": (
        "Mpt",
        dict.fromkeys(SIZES, ...)
        | {"vocab_size": 131, "d_model": 96, "n_layers": 3, "n_heads": 6, "attn_config": {"clip_qkv": 2.0}},
    ),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm, parallel": ("StableLm", {"use_parallel_residual": True}),
    "exaone4": ("Exaone4", _WINDOW | {"num_hidden_layers": 4}),
    "exaone4, without windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "nemotron": ("Nemotron", {}),
    "persimmon": ("Persimmon", NO_KV),
    "arcee": ("Arcee", {}),
    "afmoe": (
        "Afmoe",
        _WINDOW
        | {"head_dim": 16, "num_hidden_layers": 4, "num_dense_layers": 4, "mup_enabled": True, "attention_bias": True},
    ),
    "qwen3-next": ("Qwen3Next", {"head_dim": 32, "num_experts": 0, "layer_types": ["full_attention"] * 3}),
}


def in_turn(names: Iterable[str]) -> list[Any]:
    """Parameters of a test, of which two thirds are for the deep tests. The third that is not is chosen in turn, by
    the number of commits, or by the variable QUIRE_TEST_FAMILIES (0, 1 or 2)."""
    now = _third()
    return [
        name if index % _THIRDS == now else pytest.param(name, marks=pytest.mark.deep)
        for index, name in enumerate(names)
    ]


def _third() -> int:
    if "QUIRE_TEST_FAMILIES" in os.environ:
        return int(os.environ["QUIRE_TEST_FAMILIES"]) % _THIRDS
    counted = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    return int(counted.stdout) % _THIRDS if counted.returncode == 0 else 0


def causal_class(name: str) -> str:
    """The class of transformers, and the architecture, of a case's model."""
    family = CASES[name][0]
    return "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"


def write_family(name: str, folder: Path, **others: Any) -> Path:
    """A random model of a case. `others`: fields in place of the case's."""
    family, changes = CASES[name]
    kind = "Gemma3Text" if family == "Gemma3" else family
    return write_random(f"{kind}Config", causal_class(name), changes | others, folder, seed=sum(name.encode()))


def write_random(config_class: str, model_class: str, changes: dict[str, Any], folder: Path, seed: int) -> Path:
    """A random model in bf16 with random biases and norms. `changes`: fields of its config; ... leaves one out."""
    with quiet_transformers():
        import transformers

        fields = {key: value for key, value in (SIZES | changes).items() if value is not ...}
        return save_random(model_class, getattr(transformers, config_class)(**fields), folder, seed)


def save_random(model_class: str, config: Any, folder: Path, seed: int) -> Path:
    """A random model in bf16 with random biases and norms."""
    with quiet_transformers():
        import transformers

        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.normal_(0.0, 0.15)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder

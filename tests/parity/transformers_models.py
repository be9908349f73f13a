"""Tiny random models for which Quire has no family, so that the Transformers backend runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.parity.families import GPT, NO_KV, write_random

_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}

# Name of a case -> the classes of config and model in transformers, and fields of the config; ... leaves one out.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Sinks, windows in every second layer, experts with biases.
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        _EXPERTS | {"head_dim": 16, "sliding_window": 21, "rope_parameters": _ROPE},
    ),
    # Each expert has tensors of its own in the file.
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _EXPERTS),
    # Chunks, layers without positions.
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        _EXPERTS
        | {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 32,
            "num_experts_per_tok": 1,
            "no_rope_layers": [1, 0, 1],
            "attn_temperature_tuning": False,
        },
    ),
    # Neighbouring dimensions are rotated.
    "helium": ("HeliumConfig", "HeliumForCausalLM", {"head_dim": 16}),
    # One key head, learned positions.
    "gpt-bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT),
    # Learned positions that begin at row 2, scaled embeddings.
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", NO_KV),
    # Capped scores and logits, windows.
    "vaultgemma": (
        "VaultGemmaConfig",
        "VaultGemmaForCausalLM",
        {"head_dim": 32, "sliding_window": 21, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    ),
    # A gate on attention takes a view of its result; windows, experts.
    "afmoe": (
        "AfmoeConfig",
        "AfmoeForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 21,
            "global_attn_every_n_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
}


def write_transformers_model(name: str, folder: Path) -> Path:
    """A random model of a case."""
    config, model, changes = CASES[name]
    return write_random(config, model, changes, folder, seed=sum(name.encode()))

"""The tiny models of the families that are tested as GGUF files, and how each is tested."""

from __future__ import annotations

from typing import Any

# Cases of tests.parity.families that are no GGUF files, and why.
UNKNOWN = {
    "mistral": "the converter drops windows of Mistral",
    "ministral": "llama.cpp does not know it",
    "smollm3, windows": "files of SmolLM3 have no windows",
    "gptj": "llama.cpp has the name alone",
    "opt": "llama.cpp does not know it",
    "persimmon": "llama.cpp does not know it any more",
    "falcon rw": "llama.cpp has no ALiBi for Falcon",
    "afmoe": "files of AFMoE have experts",
    "qwen3-next": "files of Qwen3-Next have experts and linear attention",
}
# Other fields than those of the case, where llama.cpp implies them and files have no key.
CONVERTED: dict[str, dict[str, Any]] = {
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 256},
    "phi": {"qk_layernorm": False},
    "starcoder2": {"sliding_window": None},
}
# Cases of which transformers reads the GGUF file itself, with fields that its reader takes for granted.
READ_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama, heads of 80": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {"query_pre_attn_scalar": 256},
    "phi3": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "gpt2": {"n_positions": 1024, "n_inner": 256},
    "bloom": {},
    "falcon 7b": {},
    "stablelm": {},
    "stablelm, parallel": {},
    "nemotron": {},
}
# Architectures of the catalogue's models, which tests.parity.test_real_models compares with transformers.
REAL_MODELS = ("llama", "gemma3")
# Fields of config.json with which the catalogue has models that Quire computes as those of another family.
ALIKE_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "granite": {"attention_multiplier": 0.25},
}

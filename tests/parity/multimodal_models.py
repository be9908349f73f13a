"""Tiny random multimodal models, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.oracle import quiet_transformers
from tests.parity.families import CASES as FAMILIES
from tests.parity.families import SIZES, save_random
from tests.parity.transformers_models import CASES as TRANSFORMERS

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_LLAMA4_VISION = _VISION | {
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "num_hidden_layers": 1,
}
_SCALED: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
# Name of a case -> the multimodal class, the config classes of the whole, of its text and of its images, and the fields
# of each.
CASES: dict[str, tuple[str, str, str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        "Gemma3TextConfig",
        "SiglipVisionConfig",
        {"mm_tokens_per_image": 4, "image_token_index": 130},
        FAMILIES["gemma3"][1],
        _VISION,
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        "MistralConfig",
        "PixtralVisionConfig",
        {"image_token_index": 130, "tie_word_embeddings": False},
        {"sliding_window": None},
        _VISION | {"head_dim": 16},
    ),
    "mistral3, ministral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        "Ministral3Config",
        "PixtralVisionConfig",
        {"image_token_index": 130, "tie_word_embeddings": False},
        {"head_dim": 16, "sliding_window": None, "rope_parameters": _SCALED},
        _VISION | {"head_dim": 16},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        "LlamaConfig",
        "CLIPVisionConfig",
        {"image_token_index": 130, "tie_word_embeddings": False},
        {},
        _VISION,
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        "Llama4TextConfig",
        "Llama4VisionConfig",
        {"image_token_index": 130},
        TRANSFORMERS["llama4"][2],
        _LLAMA4_VISION,
    ),
}


def write_multimodal(name: str, folder: Path) -> Path:
    """A random model of a case."""
    model, whole, text, vision, fields, text_fields, vision_fields = CASES[name]
    with quiet_transformers():
        import transformers

        config = getattr(transformers, whole)(
            text_config=getattr(transformers, text)(**(SIZES | text_fields)),
            vision_config=getattr(transformers, vision)(**vision_fields),
            **fields,
        )
    return save_random(model, config, folder, seed=sum(name.encode()))

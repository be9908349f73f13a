"""The language model in a multimodal checkpoint: its config, and its tensors among the tensors of the other parts.

This module knows the multimodal classes of transformers whose language model computes text in the same way as it does
alone. It knows nothing of families: the resulting config looks like the config of the language model's own folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from quire_common.errors import Unsupported
from quire_worker.model.config_check import check_fields
from quire_worker.model.config_file import ConfigFile

TEXT: Final = "text_config"
_OLD_PREFIX: Final = "language_model."
_PROJECTED: Final = (
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
)  # fmt: skip  # a list of names
# Ends of the names of classes that are no multimodal ones, whatever their configs have.
_TEXT_ALONE: Final = ("ForCausalLM", "LMHeadModel")
# Fields that the whole model has, where it has them.
_SHARED: Final = ("eos_token_id", "tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class MultimodalClass:
    """A multimodal class of transformers."""

    text_types: tuple[str, ...]
    """`model_type` of the language models that it may have; the first where `text_config` does not say."""
    other_parts: tuple[str, ...]
    """Beginnings of the names of tensors of the other parts."""


MULTIMODAL: Final = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": MultimodalClass(("gemma3_text",), _PROJECTED),
        "Mistral3ForConditionalGeneration": MultimodalClass(("mistral", "ministral3"), _PROJECTED),
        "LlavaForConditionalGeneration": MultimodalClass(("llama", "mistral", "qwen2"), _PROJECTED),
        "Llama4ForConditionalGeneration": MultimodalClass(
            ("llama4_text",), ("vision_model.", "multi_modal_projector.")
        ),
    }
)
TEXT_CLASSES: Final = MappingProxyType(
    {
        "gemma3_text": "Gemma3ForCausalLM",
        "llama": "LlamaForCausalLM",
        "llama4_text": "Llama4ForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    }
)
"""`model_type` of a language model -> its class."""
# Checkpoints leave out the sizes of `text_config` that are the defaults of transformers.
DEFAULT_SIZES: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        "gemma3_text": {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
        },
        "llama": {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
        "mistral": {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
        },
    }
)


@dataclass(frozen=True, slots=True)
class TextPart:
    """The language model of a multimodal checkpoint."""

    config: ConfigFile
    """As config.json of the language model alone."""
    other_parts: tuple[str, ...]

    def tensor_name(self, name: str) -> str | None:
        """Return the name that a tensor of the checkpoint has in the language model alone; None for tensors of other
        parts.

        Old checkpoints have `language_model.` before all names. New checkpoints have `model.language_model.` in place
        of `model.`, and the usual name of the head.
        """
        if name.startswith(self.other_parts):
            return None
        if name.startswith(_OLD_PREFIX):
            return name.removeprefix(_OLD_PREFIX)
        return name.replace(f"model.{_OLD_PREFIX}", "model.", 1) if name.startswith(f"model.{_OLD_PREFIX}") else name


def text_part(config: ConfigFile, overrides: Mapping[str, Any]) -> TextPart | None:
    """Return the language model of a multimodal config.json, with the shared fields filled in, and with default sizes
    for the types that DEFAULT_SIZES has. None for another config.json. The shared fields of the whole config, where it
    has them, replace the section's. `overrides`, other than `text_config`, `architectures` and `model_type`, replace
    both. Raises ConfigError if the language model's section is missing or has a wrong type. Raises Unsupported for a
    multimodal class or a language model that is not in the table, and for a field of the whole config, not overridden,
    that changes the computation."""
    named = config.texts("architectures")
    architecture = next((name for name in named if name in MULTIMODAL), None)
    if architecture is None:
        if config.has(TEXT) and not any(name.endswith(_TEXT_ALONE) for name in named):
            raise _unknown(config, named)
        return None
    wrapper, section = MULTIMODAL[architecture], config.section(TEXT)
    if section is None:
        raise config.bad(TEXT, "an object, the config of the language model")
    check_fields(replace(config, seen={*config.seen, *overrides}), {})
    text_type = section.text("model_type", wrapper.text_types[0])
    if text_type not in wrapper.text_types:
        raise Unsupported(
            "UNSUPPORTED_ARCHITECTURE",
            f"{section.source}: the language model of {architecture} is of the type {text_type}, which is not "
            f"supported there; supported are {', '.join(wrapper.text_types)}.",
            "Serve another model.",
            param="model",
        )
    shared = {name: config.fields[name] for name in _SHARED if config.has(name)}
    own = {name: value for name, value in overrides.items() if name not in (TEXT, "architectures", "model_type")}
    fields = {
        **DEFAULT_SIZES.get(text_type, {}),
        **section.fields,
        **shared,
        **own,
        "architectures": [TEXT_CLASSES[text_type]],
        "model_type": text_type,
    }
    return TextPart(replace(section, fields=fields), wrapper.other_parts)


def _unknown(config: ConfigFile, named: tuple[str, ...]) -> Unsupported:
    """Make the error (UNSUPPORTED_ARCHITECTURE) for a config.json whose language model is in `text_config` and whose
    class is not in the table. It lists the supported classes."""
    asked = ", ".join(named) if named else f"none (model_type {config.text('model_type', 'absent')})"
    return Unsupported(
        "UNSUPPORTED_ARCHITECTURE",
        f"{config.source} names the architecture {asked}, whose language model is in `{TEXT}`. Of such "
        f"architectures, the text of these is supported: {', '.join(MULTIMODAL)}.",
        "Serve one of these, or a model of text alone.",
        param="model",
    )

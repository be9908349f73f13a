"""Llama 1 to 3 and what copies them."""

from __future__ import annotations

from dataclasses import asdict

from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.architectures.common import USUAL_NAMES, read_activation, read_rope, read_sizes, refuse_windows
from quire_worker.model.architectures.family import Family
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Biases are flags of the config."""
    refuse_windows(config)
    attention_bias = config.flag("attention_bias", False)
    return ArchSpec(
        architecture=architecture,
        **asdict(read_sizes(config)),
        rope=read_rope(config),
        activation=read_activation(config),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


LLAMA = Family(("LlamaForCausalLM",), build_spec, USUAL_NAMES, "llama")

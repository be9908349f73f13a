"""Qwen2 and Qwen2.5: biases on query, key and value, optional sliding windows in the upper layers."""

from __future__ import annotations

from dataclasses import asdict

from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.architectures.common import USUAL_NAMES, read_activation, read_rope, read_sizes, read_windows
from quire_worker.model.architectures.family import Family
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """The biases are the family's, not the config's."""
    sizes = read_sizes(config)
    return ArchSpec(
        architecture=architecture,
        **asdict(sizes),
        rope=read_rope(config),
        activation=read_activation(config),
        qkv_bias=True,
        windows=read_windows(config, sizes.layers),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


QWEN2 = Family(("Qwen2ForCausalLM",), build_spec, USUAL_NAMES, "qwen2", {"qkv_bias": True})

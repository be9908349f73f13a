"""Qwen3, dense: norms on query and key heads, a head size of its own."""

from __future__ import annotations

from dataclasses import asdict

from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.architectures.common import USUAL_NAMES, read_activation, read_rope, read_sizes, read_windows
from quire_worker.model.architectures.family import Family
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Return what config.json says of a Qwen3 model as an ArchSpec. A head has 128 dimensions if the file has no
    `head_dim`. Raises ConfigError or Unsupported."""
    sizes = read_sizes(config, default_head_dim=128)
    attention_bias = config.flag("attention_bias", False)
    return ArchSpec(
        architecture=architecture,
        **asdict(sizes),
        rope=read_rope(config),
        activation=read_activation(config),
        qk_norm="head",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=read_windows(config, sizes.layers),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


QWEN3 = Family(("Qwen3ForCausalLM",), build_spec, USUAL_NAMES, "qwen3", {"use_qk_norm": True})

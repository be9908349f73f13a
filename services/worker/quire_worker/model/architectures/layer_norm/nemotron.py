"""Nemotron 4 and Minitron: layer norms whose stored weights are 1 less, squared ReLU, half of each head rotates."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec
from quire_worker.model.architectures.common import USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import BIASES, GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Nemotron model: layer norms whose weights are stored less 1, a plain MLP, and RoPE. `config`
    has the family's defaults already (see `Family.adapt`): squared ReLU, and rotation of half of each head. Flags of
    the config say which linear layers have biases."""
    sizes, bias = read_sizes(config, eps="norm_eps", default_eps=1e-5), config.flag("attention_bias", False)
    attention = sizes.attention(rope=read_rope(config, sizes.head_dim), qkv_bias=bias, o_bias=bias)
    layer = LayerSpec(attention, read_dense(config, sizes, gated=False, bias=config.flag("mlp_bias", False)))
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(sizes.norm_eps, "layer", bias=True, weight_offset=1.0),
        tied_embeddings=is_tied(config),
    )


NEMOTRON = Family(
    ("NemotronForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "nemotron",
    renamed={"rope_percent": "partial_rotary_factor", "rope_percentage": "partial_rotary_factor"},
    defaults={"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    gguf=(GgufMap("nemotron", eps="norm_eps", present=BIASES, rotates_part=True),),
    models="Nemotron-4, Minitron 4B and 8B",
)

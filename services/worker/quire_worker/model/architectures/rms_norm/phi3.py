"""Phi-3, Phi-3.5 and Phi-4: fused weight matrices, longrope, a partial rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_worker.model.arch_spec import ArchSpec, LayerSpec
from quire_worker.model.architectures.common import is_tied, read_dense, read_sizes, usual_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.architectures.ropes import ORIGINAL, read_rope
from quire_worker.model.architectures.windows import every_layer
from quire_worker.model.config_check import refused
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Phi-3 or Phi-4 model: a Llama with RoPE, possibly longrope or on a part of each head. If the
    config has a window shorter than the context, all layers have it. Raises Unsupported for biases of attention."""
    sizes = read_sizes(config, default_eps=1e-5)
    rope, mlp = read_rope(config, sizes.head_dim), read_dense(config, sizes)
    config.note_read("attention_bias")
    if config.flag("attention_bias", False, null=False):
        raise refused(config, "attention_bias", "biases")
    layers = tuple(
        LayerSpec(sizes.attention(rope=rope, window=window), mlp) for window in every_layer(config, sizes.layers)
    )
    return sizes.arch_spec(architecture, layers, tied_embeddings=is_tied(config))


def _original_context(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the original context of a GGUF file, which only models with longrope have."""
    rope = fields["rope_parameters"]
    return {ORIGINAL: rope[ORIGINAL]} if ORIGINAL in rope else {}


PHI3 = Family(
    ("Phi3ForCausalLM",),
    build_spec,
    usual_names(**dict.fromkeys("qkv", "self_attn.qkv_proj"), gate="mlp.gate_up_proj", up="mlp.gate_up_proj"),
    "phi3",
    defaults={ORIGINAL: 4096},
    gguf=(
        GgufMap(
            "phi3",
            keys={"attention.sliding_window": "sliding_window"},
            derive=_original_context,
            parts={"gate": ("ffn_up",)},
            rotates_part=True,
        ),
    ),
    models="Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4-mini",
)

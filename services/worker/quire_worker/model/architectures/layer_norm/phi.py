"""Phi-1, Phi-1.5 and Phi-2: attention beside the MLP, part of each head rotates."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec, QkNormSpec
from quire_worker.model.architectures.common import LAYER_EPS, is_tied, read_dense, read_sizes, tensor_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Phi-1 or Phi-2 model: attention and a plain MLP in parallel after one shared norm, and RoPE.
    `config` has the family's defaults already (see `Family.adapt`): half of each head rotates. All linear layers have
    biases, also the output head. `qk_layernorm` adds norms of query and key heads."""
    sizes = read_sizes(config, eps=LAYER_EPS, default_eps=1e-5)
    normed = config.flag("qk_layernorm", False)
    attention = sizes.attention(
        rope=read_rope(config, sizes.head_dim),
        qk_norm=QkNormSpec(kind="layer", bias=True) if normed else None,
        qkv_bias=True,
        o_bias=True,
    )
    mlp = read_dense(config, sizes, gated=False, bias=True)
    layer = LayerSpec(attention, mlp, parallel=True, shared_norm=True)
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(sizes.norm_eps, "layer", bias=True),
        tied_embeddings=is_tied(config),
        head_bias=True,
    )


PHI = Family(
    ("PhiForCausalLM",),
    build_spec,
    tensor_names(
        {"embed": "model.embed_tokens", "final_norm": "model.final_layernorm", "head": "lm_head"},
        "model.layers.{layer}",
        {"attention_norm": "input_layernorm", "o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}
        | {part: f"self_attn.{part}_proj" for part in "qkv"}
        | {f"{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"},
    ),
    "phi",
    defaults={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    gguf=(GgufMap("phi2", eps=LAYER_EPS, rotates_part=True),),
    models="Phi-1, Phi-1.5, Phi-2",
)

"""GLM-4: RoPE over neighbouring dimensions of half of each head. The 0414 models also have norms after blocks."""

from __future__ import annotations

from dataclasses import replace

from quire_worker.model.arch_spec import ArchSpec, LayerSpec
from quire_worker.model.architectures.common import is_tied, read_dense, read_sizes, usual_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a GLM-4 model: a gated MLP, RoPE over neighbours, and by default biases of query, key and
    value. `config` has the family's defaults already (see `Family.adapt`): half of each head rotates. The 0414 models
    also have norms after blocks."""
    sizes = read_sizes(config, head_dim=128, default_eps=1.5625e-7)
    attention = sizes.attention(
        rope=read_rope(config, sizes.head_dim, interleaved=True), qkv_bias=config.flag("attention_bias", True)
    )
    layer = LayerSpec(attention, read_dense(config, sizes), post_norm=architecture == GLM4.architectures[0])
    return sizes.arch_spec(architecture, (layer,) * sizes.layers, tied_embeddings=is_tied(config))


_FUSED = {"gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj"}
_DEFAULTS = {"partial_rotary_factor": 0.5}
_GGUF = GgufMap("chatglm", present={"attention_bias": "q.bias"}, parts={"gate": ("ffn_up",)}, rotates_part=True)
GLM = Family(
    ("GlmForCausalLM",),
    build_spec,
    usual_names(**_FUSED),
    "glm",
    defaults=_DEFAULTS,
    gguf=(_GGUF,),
    models="GLM-4 9B, GLM-Edge; as GGUF files ChatGLM 2 and 3",
)
GLM4 = Family(
    ("Glm4ForCausalLM",),
    build_spec,
    usual_names(**_FUSED, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"),
    "glm4",
    defaults=_DEFAULTS,
    gguf=(replace(_GGUF, architecture="glm4"),),
    models="GLM-4 0414 9B and 32B, GLM-Z1",
)

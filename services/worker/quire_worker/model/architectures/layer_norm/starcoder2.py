"""StarCoder2: layer norms, an MLP of two matrices, biases."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec
from quire_worker.model.architectures.common import is_tied, read_dense, read_sizes, usual_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import every_layer
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a StarCoder2 model: layer norms, a plain MLP, RoPE, by default biases and a tied output head.
    If the config has a window shorter than the context, all layers have it."""
    sizes, bias = read_sizes(config, eps="norm_epsilon", default_eps=1e-5), config.flag("use_bias", True)
    rope, mlp = read_rope(config, sizes.head_dim), read_dense(config, sizes, gated=False, bias=bias)
    layers = tuple(
        LayerSpec(sizes.attention(rope=rope, window=window, qkv_bias=bias, o_bias=bias), mlp)
        for window in every_layer(config, sizes.layers)
    )
    return sizes.arch_spec(
        architecture,
        layers,
        norm=NormSpec(sizes.norm_eps, "layer", bias=True),
        tied_embeddings=is_tied(config, default=True),
    )


STARCODER2 = Family(
    ("Starcoder2ForCausalLM",),
    build_spec,
    usual_names(up="mlp.c_fc", down="mlp.c_proj"),
    "starcoder2",
    defaults={"hidden_act": "gelu_pytorch_tanh"},
    gguf=(GgufMap("starcoder2", eps="norm_epsilon", present={"use_bias": "q.bias"}),),
    models="StarCoder2 3B to 15B",
)

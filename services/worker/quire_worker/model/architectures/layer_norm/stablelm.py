"""StableLM: a Llama with layer norms, in which a part of each head rotates."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec
from quire_worker.model.architectures.common import LAYER_EPS, USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.config_check import refused
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a StableLM model: layer norms, a gated MLP, RoPE on the share `partial_rotary_factor` of each
    head, optional biases of query, key and value. Attention may lie beside the MLP, with one norm for both. `config`
    has the family's defaults already (see `Family.adapt`), here a quarter of each head. Raises Unsupported for norms of
    heads."""
    sizes = read_sizes(config, eps=LAYER_EPS, default_eps=1e-5)
    if config.flag("qk_layernorm", False):
        raise refused(config, "qk_layernorm", "a norm for each head")
    attention = sizes.attention(rope=read_rope(config, sizes.head_dim), qkv_bias=config.flag("use_qkv_bias", False))
    parallel = config.flag("use_parallel_residual", False)
    layer = LayerSpec(attention, read_dense(config, sizes), parallel=parallel, shared_norm=parallel)
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(sizes.norm_eps, "layer", bias=True),
        tied_embeddings=is_tied(config),
    )


STABLELM = Family(
    ("StableLmForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "stablelm",
    defaults={"partial_rotary_factor": 0.25},
    gguf=(
        GgufMap(
            "stablelm",
            eps=LAYER_EPS,
            present={"use_qkv_bias": "q.bias", "second_norm": "mlp_norm.weight"},
            # The converter does not know the default of use_parallel_residual, so its key may be wrong.
            derive=lambda fields: {"use_parallel_residual": not fields["second_norm"]},
            rotates_part=True,
            neutral={"use_parallel_residual": ()},
        ),
    ),
    models="StableLM 2 1.6B, StableLM 3B, Stable Code",
)

"""Qwen3-Next of full attention and dense layers alone: a gate on attention's output, whose weights lie between those of
the query heads."""

from __future__ import annotations

from collections.abc import Callable

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec, QkNormSpec
from quire_worker.model.architectures.common import MOST_LAYERS, is_tied, read_dense, read_sizes, usual_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import FULL, layer_types, refuse_windows
from quire_worker.model.config_check import refused
from quire_worker.model.config_file import ConfigFile

_LINEAR = "linear_attention"


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Qwen3-Next model: a gate on attention's output, norms of heads, and norm weights that are
    stored less 1. `config` has the family's defaults already (see `Family.adapt`): a quarter of each head rotates.
    Raises Unsupported if a layer has linear attention, a window, experts or biases of attention."""
    sizes = read_sizes(config, head_dim=256)
    layer_types(config, sizes.layers, _default_type(config))  # refuses linear attention
    refuse_windows(config)
    if _has_experts(config, sizes.layers):
        raise refused(config, "num_experts", "a mixture of experts")
    if config.flag("attention_bias", False):
        raise refused(config, "attention_bias", "a bias of the gate on attention's output")
    attention = sizes.attention(rope=read_rope(config, sizes.head_dim), qk_norm=QkNormSpec(), output_gate=True)
    layers = (LayerSpec(attention, read_dense(config, sizes)),) * sizes.layers
    norm = NormSpec(sizes.norm_eps, weight_offset=1.0)
    return sizes.arch_spec(architecture, layers, norm=norm, tied_embeddings=is_tied(config))


def _default_type(config: ConfigFile) -> Callable[[int], str]:
    """Return the function from a layer's index to its type, for a config without `layer_types`."""
    every = config.integer("full_attention_interval", 4)
    return lambda layer: _LINEAR if (layer + 1) % every else FULL


def _has_experts(config: ConfigFile, layers: int) -> bool:
    """Whether any layer has experts: each `decoder_sparse_step`-th layer has them, except those in `mlp_only_layers`.
    With `num_experts` 0 none has; an absent field counts as 512."""
    every, dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    if config.integer("num_experts", 512, minimum=0) == 0:
        return False
    return any((layer + 1) % every == 0 and layer not in dense for layer in range(layers))


def is_covered(config: ConfigFile) -> bool:
    """Whether Quire computes this model: no layer has linear attention or experts, and attention has no biases.
    Windows, which `build_spec` refuses, are not looked at."""
    layers, default = config.integer("num_hidden_layers", maximum=MOST_LAYERS), _default_type(config)
    types = config.texts("layer_types") or [default(layer) for layer in range(layers)]
    biased = config.flag("attention_bias", False)
    return _LINEAR not in types and not biased and not _has_experts(config, layers)


QWEN3_NEXT = Family(
    ("Qwen3NextForCausalLM",),
    build_spec,
    usual_names(output_gate="self_attn.q_proj"),
    "qwen3_next",
    defaults={"partial_rotary_factor": 0.25},
    by_head=True,
    covers=is_covered,
    models="Qwen3-Next with full attention and dense layers alone. Published models have other layers",
)

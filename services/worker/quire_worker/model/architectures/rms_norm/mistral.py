"""Mistral, and Ministral, which has windows in some of its layers."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec
from quire_worker.model.architectures.common import USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import WINDOW_DEFAULT, every_layer, layer_types, windows_of
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Mistral model: a Llama without biases. If `layer_types` is given, it names the layers with
    the window. Otherwise all layers have the window, or none if it is null or covers the context. `config` has the
    family's defaults already (see `Family.adapt`): a window of 4096."""
    sizes = read_sizes(config)
    rope, mlp, types = read_rope(config, sizes.head_dim), read_dense(config, sizes), layer_types(config, sizes.layers)
    windows = windows_of(config, types) if types else every_layer(config, sizes.layers)
    layers = tuple(LayerSpec(sizes.attention(rope=rope, window=window), mlp) for window in windows)
    return sizes.arch_spec(architecture, layers, tied_embeddings=is_tied(config))


MISTRAL = Family(
    ("MistralForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "mistral",
    defaults=WINDOW_DEFAULT,
    models="Mistral 7B, Mistral Small, Mistral Nemo",
)
MINISTRAL = Family(
    ("MinistralForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "ministral",
    defaults=WINDOW_DEFAULT,
    models="Ministral 8B",
)

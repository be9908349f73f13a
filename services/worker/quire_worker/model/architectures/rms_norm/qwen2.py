"""Qwen2 and Qwen2.5: biases on query, key and value, optional sliding windows in the upper layers."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec
from quire_worker.model.architectures.common import USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import switched_windows
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Qwen2 model: a Llama with biases of query, key and value, which the config does not mention.
    Layers have windows only if `use_sliding_window` is on."""
    sizes = read_sizes(config)
    rope, mlp = read_rope(config, sizes.head_dim), read_dense(config, sizes)
    layers = tuple(
        LayerSpec(sizes.attention(rope=rope, qkv_bias=True, window=window), mlp)
        for window in switched_windows(config, sizes.layers)
    )
    return sizes.arch_spec(architecture, layers, tied_embeddings=is_tied(config))


QWEN2 = Family(
    ("Qwen2ForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "qwen2",
    says={"qkv_bias": True},
    gguf=(GgufMap("qwen2"),),
    models="Qwen2, Qwen2.5, QwQ",
)

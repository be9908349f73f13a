"""OLMo 2 and 3: norms only after blocks, one norm over all query heads and one over all key heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, QkNormSpec, RopeSpec
from quire_worker.model.architectures.common import is_tied, read_dense, read_sizes, usual_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import WINDOWS, GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import FULL, SLIDING, WINDOW_DEFAULT, layer_types, windows_of
from quire_worker.model.config_check import refused
from quire_worker.model.config_file import ConfigFile

_THETA = 500_000.0
_UNCLEAR = (
    "a RoPE that releases of transformers read in several ways (name both types of layers in `rope_parameters`, and "
    "set `rope_scaling` and `rope_theta` to null)"
)


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of an OLMo 2 or 3 model: norms only after blocks, one norm over all query heads and one over all
    key heads. By default, three of four layers of OLMo 3 have windows; the RoPE of these layers is not scaled unless
    `rope_parameters` has one for each type of layer."""
    sizes, bias = read_sizes(config, default_eps=1e-5), config.flag("attention_bias", False)
    types = (FULL,) * sizes.layers
    if architecture == OLMO3.architectures[0]:
        types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % 4 else FULL)
        ropes = _ropes(config, sizes.head_dim)
    else:
        ropes = {FULL: read_rope(config, sizes.head_dim)}
    mlp = read_dense(config, sizes)
    layers = tuple(
        LayerSpec(
            sizes.attention(rope=ropes[kind], window=window, qk_norm=QkNormSpec("whole"), qkv_bias=bias, o_bias=bias),
            mlp,
            pre_norm=False,
            post_norm=True,
        )
        for kind, window in zip(types, windows_of(config, types), strict=True)
    )
    return sizes.arch_spec(architecture, layers, tied_embeddings=is_tied(config))


def _ropes(config: ConfigFile, head_dim: int) -> dict[str, RopeSpec]:
    """Read the RoPE of each type of layer of an OLMo 3 model. Old files have one RoPE for all layers, whose scaling
    does not apply to layers with windows. Raises Unsupported for RoPE fields that versions of transformers have read in
    several ways."""
    full, usual = read_rope(config, head_dim, layer_type=FULL, theta=_THETA), RopeSpec(theta=_THETA)
    section, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    if section is not None and (section.has(FULL) or section.has(SLIDING)):
        sliding = section.section(SLIDING)
        # transformers 5.23 applies a base beside the section only to layers without windows.
        if full.theta != usual.theta and not (sliding and sliding.has("rope_theta")):
            raise refused(config, "rope_theta", _UNCLEAR)
        return {FULL: full, SLIDING: read_rope(config, head_dim, layer_type=SLIDING, theta=_THETA)}
    # transformers 5 began with such a section for all layers, and 5.23 ignores it.
    if section is not None and full != usual:
        raise refused(config, "rope_parameters", _UNCLEAR)
    # transformers 4 applies the base to all layers, and 5.23 only to those without windows.
    if full.theta != usual.theta:
        raise refused(config, "rope_theta", _UNCLEAR)
    # transformers 5.23 knows no `type`.
    if scaling is not None and not scaling.has("rope_type") and full != usual:
        raise refused(config, "rope_scaling", _UNCLEAR)
    return {FULL: full, SLIDING: usual}


def _rope_by_layer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE of each type of layer, of which a GGUF file has one for all layers. As in llama.cpp, its scaling
    does not apply to layers with windows."""
    rope = fields["rope_parameters"]
    return {"rope_parameters": {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": rope["rope_theta"]}}}


_NAMES = usual_names(
    attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm", mlp_norm="none"
)
OLMO2 = Family(("Olmo2ForCausalLM",), build_spec, _NAMES, "olmo2", gguf=(GgufMap("olmo2"),), models="OLMo 2 1B to 32B")
OLMO3 = Family(
    ("Olmo3ForCausalLM",),
    build_spec,
    _NAMES,
    "olmo3",
    defaults=WINDOW_DEFAULT,
    gguf=(
        GgufMap(
            "olmo2",
            keys=WINDOWS,
            nonzero=("attention.sliding_window",),
            derive=_rope_by_layer,
            if_key="attention.sliding_window",
        ),
    ),
    models="OLMo 3 7B and 32B",
)

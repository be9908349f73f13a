"""Gemma 1 to 3: norms whose stored weights are 1 less, scaled embeddings; since Gemma 2, norms after blocks, and
windows in some layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire_worker.model.arch_spec import ArchSpec, Dense, LayerSpec, NormSpec, QkNormSpec, RopeSpec
from quire_worker.model.architectures.common import (
    USUAL_NAMES,
    Sizes,
    is_tied,
    read_activation,
    read_sizes,
    usual_names,
)
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import FULL, SLIDING, WINDOW_DEFAULT, layer_types, windows_of
from quire_worker.model.config_check import refused
from quire_worker.model.config_file import ConfigFile

_POST_NORMED = usual_names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def _model(architecture: str, config: ConfigFile, sizes: Sizes, layers: tuple[LayerSpec, ...]) -> ArchSpec:
    """Build a Gemma's spec from sizes and layers: norm weights stored less 1, embeddings times sqrt(hidden size), a
    tied head by default, and logits soft-capped by `final_logit_softcapping` unless that is null or absent. `config`
    has the family's defaults already (see `Family.adapt`): 30 in Gemma 2. Raises Unsupported for bidirectional
    attention."""
    _refuse_bidirectional(config)
    return sizes.arch_spec(
        architecture,
        layers,
        norm=NormSpec(sizes.norm_eps, weight_offset=1.0),
        tied_embeddings=is_tied(config, default=True),
        embedding_scale=sizes.hidden_size**0.5,
        logit_softcap=_cap(config, "final_logit_softcapping", 0.0),
    )


def _refuse_bidirectional(config: ConfigFile) -> None:
    if config.flag("use_bidirectional_attention", False, null=False):
        raise refused(config, "use_bidirectional_attention", "attention to later positions")


def _cap(config: ConfigFile, key: str, default: float) -> float:
    """Read a soft cap; 0 if it is null."""
    return config.number(key) if config.has(key) else 0.0 if config.is_null(key) else default


def build_gemma(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Gemma 1 model, whose MLP uses gelu in its tanh form. `hidden_activation` names it, else
    `hidden_act`. Old files have gelu there, but mean this form. Raises Unsupported for another activation."""
    sizes, bias = read_sizes(config, head_dim=256), config.flag("attention_bias", False)
    attention = sizes.attention(rope=read_rope(config, sizes.head_dim), qkv_bias=bias, o_bias=bias)
    config.note_read("hidden_act", "hidden_activation")
    named = config.text("hidden_activation", config.text("hidden_act", "gelu_pytorch_tanh"), nullable=True)
    if named not in ("gelu", "gelu_pytorch_tanh"):
        raise refused(config, "hidden_activation" if config.has("hidden_activation") else "hidden_act", "another MLP")
    layer = LayerSpec(attention, Dense(sizes.intermediate_size, "gelu_tanh"))
    return _model(architecture, config, sizes, (layer,) * sizes.layers)


def build_gemma2(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Gemma 2 model. Without `layer_types`, every other layer has a window, beginning with the
    first layer. Scores are soft-capped, by default at 50, unless the cap is null."""
    return _alternating(architecture, config, lambda layer: FULL if layer % 2 else SLIDING, caps=True)


def build_gemma3(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Gemma 3 model, with norms of heads. Without `layer_types`, five layers have a window and a
    small RoPE base, and the sixth has no window and a large base; `sliding_window_pattern` replaces the six."""
    pattern = config.integer("sliding_window_pattern", 6, nullable=True)
    return _alternating(architecture, config, lambda layer: SLIDING if (layer + 1) % pattern else FULL, caps=False)


def _alternating(architecture: str, config: ConfigFile, default: Callable[[int], str], *, caps: bool) -> ArchSpec:
    """Build the spec of a Gemma 2 model (`caps`), with scores soft-capped, by default at 50, or of a Gemma 3 model,
    with norms of heads and a RoPE of its own for layers with windows. Scores are divided by the root of
    `query_pre_attn_scalar`, by default 256. `default` gives a layer's type if the config does not. Both have norms
    before and after blocks. Raises Unsupported for a Gemma 3 with soft-capped scores."""
    sizes, bias = read_sizes(config, head_dim=256), config.flag("attention_bias", False)
    types = layer_types(config, sizes.layers, default)
    theta = 10000.0 if caps else 1e6
    ropes = {kind: read_rope(config, sizes.head_dim, layer_type=kind, theta=theta) for kind in (FULL, SLIDING)}
    if not caps and not _is_by_layer(config):
        ropes[SLIDING] = RopeSpec(theta=config.number("rope_local_base_freq", 10000.0))
    if _cap(config, "attn_logit_softcapping", 0.0) and not caps:
        raise refused(config, "attn_logit_softcapping", "capped attention scores")
    mlp = Dense(sizes.intermediate_size, read_activation(config, "hidden_activation", "gelu_pytorch_tanh"))
    layers = tuple(
        LayerSpec(
            sizes.attention(
                rope=ropes[kind],
                window=window,
                qkv_bias=bias,
                o_bias=bias,
                qk_norm=None if caps else QkNormSpec(),
                softcap=_cap(config, "attn_logit_softcapping", 50.0) if caps else 0.0,
                scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
            ),
            mlp,
            post_norm=True,
        )
        for kind, window in zip(types, windows_of(config, types), strict=True)
    )
    return _model(architecture, config, sizes, layers)


def _score_scale(fields: Mapping[str, Any], layers_of_27b: int) -> dict[str, Any]:
    """Return the field `query_pre_attn_scalar`, whose square root divides the scores: hidden size / heads in the model
    with `layers_of_27b` layers, else the head size. GGUF files do not have it, so this is llama.cpp's rule."""
    of_heads = fields["hidden_size"] // fields["num_attention_heads"]
    return {"query_pre_attn_scalar": of_heads if fields["num_hidden_layers"] == layers_of_27b else fields["head_dim"]}


def _full_without_window(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field that gives all layers full attention, if a GGUF file of Gemma 3 names no window; else no field."""
    return {} if "sliding_window" in fields else {"layer_types": [FULL] * fields["num_hidden_layers"]}


_GGUF_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "layer_types",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _is_by_layer(config: ConfigFile) -> bool:
    """Whether the config has a RoPE for each type of layer."""
    section = config.section("rope_parameters")
    return section is not None and section.has(SLIDING)


GEMMA = Family(
    ("GemmaForCausalLM",),
    build_gemma,
    USUAL_NAMES,
    "gemma",
    gguf=(GgufMap("gemma"),),
    models="Gemma 2B and 7B, CodeGemma",
)
GEMMA2 = Family(
    ("Gemma2ForCausalLM",),
    build_gemma2,
    _POST_NORMED,
    "gemma2",
    defaults={"final_logit_softcapping": 30.0} | WINDOW_DEFAULT,
    says={"cache_implementation": "hybrid"},
    gguf=(
        GgufMap(
            "gemma2",
            keys=_GGUF_KEYS,
            nonzero=("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
            derive=lambda fields: _score_scale(fields, layers_of_27b=46),
        ),
    ),
    models="Gemma 2 2B to 27B",
)
GEMMA3 = Family(
    ("Gemma3ForCausalLM",),
    build_gemma3,
    _POST_NORMED,
    "gemma3_text",
    renamed={"_sliding_window_pattern": "sliding_window_pattern"},
    defaults=WINDOW_DEFAULT,
    gguf=(
        GgufMap(
            "gemma3",
            keys=_GGUF_KEYS | {"rope.freq_base_swa": "rope_local_base_freq"},
            derive=lambda fields: _score_scale(fields, layers_of_27b=62) | _full_without_window(fields),
        ),
    ),
    models="Gemma 3 270M and 1B",
)

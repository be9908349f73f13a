"""Hunyuan, dense: norms on query and key heads after their rotation."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, QkNormSpec, RopeSpec
from quire_worker.model.architectures.common import is_tied, read_dense, read_sizes, usual_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.architectures.ropes import check_rope_keys, read_base, read_rope
from quire_worker.model.config_check import refused
from quire_worker.model.config_file import ConfigFile

_MOST_ALPHA = 1e6
# Keys of a `dynamic` RoPE with `alpha`. Published files have the ones after `alpha`, which the model does not use.
_KEYS = {"rope_type", "type", "rope_theta", "alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Hunyuan model: a Llama with norms of query and key heads after their rotation. A RoPE of type
    `dynamic` with an `alpha` is a plain RoPE with a larger base."""
    sizes, bias = read_sizes(config, default_eps=1e-5), config.flag("attention_bias", False)
    attention = sizes.attention(
        rope=_rope(config, sizes.head_dim), qk_norm=QkNormSpec(after_rope=True), qkv_bias=bias, o_bias=bias
    )
    layer = LayerSpec(attention, read_dense(config, sizes))
    return sizes.arch_spec(architecture, (layer,) * sizes.layers, tied_embeddings=is_tied(config))


def _rope(config: ConfigFile, head_dim: int) -> RopeSpec:
    """Read the RoPE; a `dynamic` one with `alpha` becomes a plain one with the base theta * alpha ** (D / (D - 2)).
    Raises Unsupported for `dynamic` without `alpha`, for other keys than a `dynamic` one has, and for settings that
    contradict each other. Raises ConfigError for an `alpha` above 1e6 or heads below 4."""
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    section = config.section(name)
    if section is None or section.text("rope_type", section.text("type", "default", nullable=True)) != "dynamic":
        return read_rope(config, head_dim)
    if not section.has("alpha"):
        key = "rope_type" if section.has("rope_type") else "type"
        raise refused(section, key, "a rotary embedding that changes with the length of a sequence")
    check_rope_keys(config, section, name, "dynamic", _KEYS)
    alpha = section.number("alpha")
    if head_dim < 4 or alpha > _MOST_ALPHA:
        raise section.bad("alpha", f"a number up to {_MOST_ALPHA:g}, for heads of 4 elements or more")
    theta = read_base(config, section, 10000.0)
    return RopeSpec(theta=theta * alpha ** (head_dim / (head_dim - 2)))


HUNYUAN = Family(
    ("HunYuanDenseV1ForCausalLM",),
    build_spec,
    usual_names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
    "hunyuan_v1_dense",
    says={"use_qk_norm": True},
    gguf=(GgufMap("hunyuan-dense"),),
    models="Hunyuan 0.5B to 7B",
)

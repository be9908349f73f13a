"""What the config.json files of several families have in common, and their usual tensor names."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, cast

from quire_common.errors import ConfigError, Unsupported
from quire_worker.model.arch_spec import Activation, RopeKind, RopeSpec
from quire_worker.model.architectures.config_check import refused
from quire_worker.model.config_facts import CONTEXT
from quire_worker.model.config_file import ConfigFile
from quire_worker.model.rope import SUPPORTED_ROPE_KINDS

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# Keys of a RoPE section that each kind reads.
_ANY_ROPE: Final = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ROPE_KEYS: Final = {
    "default": _ANY_ROPE,
    "linear": _ANY_ROPE | {"factor"},
    "factors": _ANY_ROPE | {"factors"},
    "llama3": _ANY_ROPE | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
# Of Qwen2 and Qwen3, where config.json does not say: the first layer with a window.
_FIRST_WINDOW: Final = 28
# Other families' names of `rms_norm_eps`.
_OTHER_EPS: Final = ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon")

# Role of a parameter -> name in the checkpoint; {layer} is the layer's index.
USUAL_NAMES: Final = MappingProxyType(
    {
        "embed.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
        "attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
        "mlp_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
        "q_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
        "k_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
    }
    | {
        f"{part}.{kind}": f"model.layers.{{layer}}.{block}.{part}_proj.{kind}"
        for block, parts in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
        for part in parts
        for kind in ("weight", "bias")
    }
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that every family's config.json gives under the same names."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float


def read_sizes(config: ConfigFile, *, default_head_dim: int = 0) -> Sizes:
    """Read and cross-check the sizes. `default_head_dim` 0 stands for hidden_size / heads."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    head_dim = config.integer("head_dim", default_head_dim or max(1, hidden // heads))
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if head_dim % 2:
        raise config.bad("head_dim", "an even integer")
    for key in _OTHER_EPS:
        if config.has(key) and not config.has("rms_norm_eps"):
            raise refused(config, key, "a norm that has no `rms_norm_eps`")
    if not config.has("head_dim") and not default_head_dim and hidden % heads:
        raise config.bad("hidden_size", f"a multiple of num_attention_heads ({heads})")
    return Sizes(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        layers=config.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        max_positions=config.positions(CONTEXT),
        norm_eps=config.number("rms_norm_eps", 1e-6),
    )


def read_activation(config: ConfigFile) -> Activation:
    """The MLP's activation by `hidden_act`, silu by default. Raises Unsupported."""
    name = config.text("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise Unsupported(
            "UNSUPPORTED_ACTIVATION",
            f"Activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}.",
            "Serve a model with a supported activation.",
        )
    return _ACTIVATIONS[name]


def read_rope(config: ConfigFile) -> RopeSpec:
    """RoPE from `rope_parameters` (new) or from `rope_theta` and `rope_scaling` (old)."""
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    section = config.section(name) or ConfigFile({}, config.source)
    kind = section.text("rope_type", section.text("type", "default"))
    if kind not in SUPPORTED_ROPE_KINDS:
        raise Unsupported(
            "UNSUPPORTED_ROPE",
            f"RoPE variant {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_KINDS)}.",
            "Serve a model with a supported variant.",
        )
    _check_rope_keys(config, section, name, kind)
    if section.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise Unsupported(
            "UNSUPPORTED_ROPE",
            "A partial rotary embedding is not supported.",
            "Serve a model that rotates whole heads.",
        )
    theta = section.number("rope_theta", config.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec("linear", theta, section.number("factor"))
    if kind == "factors":
        return RopeSpec("factors", theta, factors=section.numbers("factors"))
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise ConfigError(
            "BAD_CONFIG",
            f"{section.source}: high_freq_factor ({high}) is not above low_freq_factor ({low}).",
            "Use the config.json of the model's own revision.",
        )
    original = section.positions("original_max_position_embeddings", config.positions(CONTEXT))
    return RopeSpec(cast(RopeKind, kind), theta, section.number("factor"), low, high, original)


def _check_rope_keys(config: ConfigFile, section: ConfigFile, name: str, kind: str) -> None:
    """Raise Unsupported for a key of the section that its kind does not read, and for two values of one thing."""
    for key, value in section.fields.items():
        if value is not None and key not in _ROPE_KEYS[kind]:
            raise refused(section, key, f"more than the RoPE variant {kind!r} has")
    if section.has("type") and section.text("type") != kind:
        raise refused(section, "type", f"another RoPE variant than `rope_type` ({kind!r})")
    if section.has("rope_theta") and config.number("rope_theta", section.number("rope_theta")) != section.number(
        "rope_theta"
    ):
        raise refused(config, "rope_theta", f"another base than the one in `{name}`")
    if name == "rope_parameters" and config.has("rope_scaling"):
        old = config.section("rope_scaling")
        if old is not None and any(section.fields.get(key) != value for key, value in old.fields.items()):
            raise refused(config, "rope_scaling", "another RoPE variant than `rope_parameters`")


def read_windows(config: ConfigFile, layers: int) -> tuple[int, ...]:
    """Sliding windows per layer, from `layer_types`, or from `max_window_layers` where that is absent."""
    types = _layer_types(config, layers)
    wanted = config.has("sliding_window") and config.positions("sliding_window") < config.positions(CONTEXT)
    if wanted and not config.has("use_sliding_window"):
        # Some engines apply such a window and some do not.
        raise refused(config, "sliding_window", "a sliding window or none, as `use_sliding_window` is absent: add it")
    if not config.flag("use_sliding_window", False):
        if "sliding_attention" in types:
            raise refused(config, "layer_types", "sliding windows, where `use_sliding_window` does not")
        return ()
    if "sliding_window" not in config.fields:
        raise config.bad("sliding_window", "the number of positions of a window, as `use_sliding_window` is true")
    if not wanted:
        return ()
    window = config.integer("sliding_window")
    if not types:
        first = config.integer("max_window_layers", _FIRST_WINDOW, minimum=0)
        types = tuple("sliding_attention" if layer >= first else "full_attention" for layer in range(layers))
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def refuse_windows(config: ConfigFile) -> None:
    """Check a family that has no sliding windows: raise Unsupported where config.json asks for them."""
    if "sliding_attention" in _layer_types(config, config.integer("num_hidden_layers")):
        raise refused(config, "layer_types", "sliding windows")
    asked = config.has("sliding_window") and config.flag("use_sliding_window", True)
    if asked and config.positions("sliding_window") < config.positions(CONTEXT):
        raise refused(config, "sliding_window", "sliding windows")


def _layer_types(config: ConfigFile, layers: int) -> tuple[str, ...]:
    """`layer_types`, empty where absent: full and sliding attention."""
    types = config.texts("layer_types")
    if types and len(types) != layers:
        raise config.bad("layer_types", f"a list of {layers} kinds")
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise Unsupported(
            "UNSUPPORTED_LAYER_TYPE",
            f"Layer types {', '.join(sorted(unknown))} are not supported; full and sliding attention are.",
            "Serve a model with supported layers.",
            param="layer_types",
        )
    return types

"""The fields and tensor names that the config.json files of several families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from quire_common.errors import Unsupported
from quire_worker.model.arch_spec import Activation, ArchSpec, Attention, Dense, LayerSpec, NormSpec
from quire_worker.model.config_check import refused
from quire_worker.model.config_facts import CONTEXT
from quire_worker.model.config_file import ConfigFile

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
RMS_EPS: Final = "rms_norm_eps"
LAYER_EPS: Final = "layer_norm_eps"
# Names of a norm's epsilon in one family or another.
_EPS: Final = (RMS_EPS, LAYER_EPS, "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon")
# The fields of GPT-2's and GPT-J's configs that have other names, and the tensors in their files that are no weights.
GPT_FIELDS: Final = MappingProxyType(
    {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
    }
)
GPT_BUFFERS: Final = (".attn.bias", ".attn.masked_bias")

# More than any model has: what a broken file claims must not become a tuple of billions.
MOST_LAYERS: Final = 1 << 12
_MOST_HEADS, _MOST_HEAD_DIM = 1 << 12, 1 << 14


def tensor_names(model: Mapping[str, str], layer: str, parts: Mapping[str, str]) -> Mapping[str, str]:
    """Return the names of tensors by role, each with `.weight` and with `.bias`. `model` and `parts` map a role to a
    name without this ending. Names of `parts` are below `layer`, in which {layer} is the layer's index."""
    every = {**model, **{role: f"{layer}.{name}" for role, name in parts.items()}}
    return MappingProxyType(
        {f"{role}.{kind}": f"{name}.{kind}" for role, name in every.items() for kind in ("weight", "bias")}
    )


USUAL_MODEL: Final = MappingProxyType({"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"})
USUAL_LAYER: Final = "model.layers.{layer}"
USUAL_PARTS: Final = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    }
    | {part: f"self_attn.{part}_proj" for part in "qkvo"}
    | {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
)
USUAL_NAMES: Final = tensor_names(USUAL_MODEL, USUAL_LAYER, USUAL_PARTS)


def usual_names(**parts: str) -> Mapping[str, str]:
    """Return the usual names, with other names for some parts of a layer."""
    return tensor_names(USUAL_MODEL, USUAL_LAYER, {**USUAL_PARTS, **parts})


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that every family's config.json gives, under the usual names or under the family's own names."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float

    def attention(self, **choices: Any) -> Attention:
        """Make attention of these sizes; `choices` are its other fields."""
        return Attention(self.heads, self.kv_heads, self.head_dim, **choices)

    def arch_spec(self, architecture: str, layers: tuple[LayerSpec, ...], **choices: Any) -> ArchSpec:
        """Make the spec of a model with these sizes and layers; `choices` are its other fields. Without `norm` it has
        RMS norms with the epsilon that was read."""
        norm = choices.pop("norm", NormSpec(self.norm_eps))
        return ArchSpec(architecture, self.vocab_size, self.hidden_size, layers, self.max_positions, norm, **choices)


def read_sizes(
    config: ConfigFile, *, head_dim: int = 0, inner: int = 0, eps: str = RMS_EPS, default_eps: float = 1e-6
) -> Sizes:
    """Read and check the sizes. `head_dim` and `inner` are used if config.json does not give them. `head_dim` 0 stands
    for hidden_size / heads, as a null field does; `inner` 0 makes a missing field an error. Without
    `num_key_value_heads` there are as many KV heads as query heads. `eps` is the name of the field with the norms'
    epsilon, `default_eps` its value if it is absent.

    Raises ConfigError for missing or inconsistent sizes and an odd head size, and Unsupported if only another epsilon
    field is given.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads", maximum=_MOST_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, nullable=True)
    if not config.has("head_dim") and not head_dim and hidden % heads:
        raise config.bad("hidden_size", f"a multiple of num_attention_heads ({heads})")
    usual = head_dim if head_dim and not config.is_null("head_dim") else max(1, hidden // heads)
    found = config.integer("head_dim", usual, maximum=_MOST_HEAD_DIM, nullable=True)
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if found % 2:
        raise config.bad("head_dim", "an even integer")
    for key in _EPS:
        if key != eps and config.has(key) and not config.has(eps):
            raise refused(config, key, f"a norm that has no `{eps}`")
    return Sizes(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        layers=config.integer("num_hidden_layers", maximum=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=found,
        intermediate_size=config.integer("intermediate_size", inner or None, nullable=bool(inner)),
        max_positions=config.positions(CONTEXT),
        norm_eps=config.number(eps, default_eps),
    )


def read_activation(config: ConfigFile, key: str = "hidden_act", default: str = "silu") -> Activation:
    """Read the activation of the feed-forward block from the field `key`. Raises Unsupported for a name that Quire does
    not know."""
    name = config.text(key, default)
    if name not in _ACTIVATIONS:
        raise Unsupported(
            "UNSUPPORTED_ACTIVATION",
            f"Activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}.",
            "Serve a model with a supported activation.",
        )
    return _ACTIVATIONS[name]


def read_dense(config: ConfigFile, sizes: Sizes, *, gated: bool = True, bias: bool = False) -> Dense:
    """Read the feed-forward block of all layers."""
    return Dense(sizes.intermediate_size, read_activation(config), gated=gated, bias=bias)


def is_tied(config: ConfigFile, *, default: bool = False) -> bool:
    """Whether the embedding is also the weight of the output head."""
    return config.flag("tie_word_embeddings", default)

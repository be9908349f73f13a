"""The map of a family's tensors and metadata in GGUF files. The family has another map for safetensors.

The names are those of llama.cpp, whose gguf package has the same tables. A map knows nothing of files; `weights.gguf`
uses the map to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from quire_worker.model.arch_spec import ArchSpec, LayerSpec

RMS_KEY: Final = "attention.layer_norm_rms_epsilon"
LAYER_KEY: Final = "attention.layer_norm_epsilon"
# Fields of many families, for `present` and `keys` of their maps.
BIASES: Final = {"attention_bias": "q.bias", "mlp_bias": "up.bias"}
WINDOWS: Final = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "layer_types",
}

# Part of a parameter's role -> its names in GGUF files. The first name that the file has is used.
_MODEL: Final = {
    "embed": ("token_embd",),
    "positions": ("position_embd",),
    "embedding_norm": ("token_embd_norm",),
    "final_norm": ("output_norm",),
    "head": ("output",),
}
_LAYER: Final = {
    "attention_norm": ("attn_norm",),
    "mlp_norm": ("ffn_norm",),
    "attention_post_norm": ("post_attention_norm",),
    "mlp_post_norm": ("post_ffw_norm",),
    "q_norm": ("attn_q_norm",),
    "k_norm": ("attn_k_norm",),
    **{part: (f"attn_{part}", "attn_qkv") for part in "qkv"},
    "o": ("attn_output",),
    "gate": ("ffn_gate",),
    "up": ("ffn_up",),
    "down": ("ffn_down",),
}


@dataclass(frozen=True, slots=True)
class GgufMap:
    """The contents of the GGUF files of one family."""

    architecture: str
    """Their `general.architecture`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the file, without the architecture in front -> fields of config.json, by the family's own names. They are
    in addition to the keys of all architectures."""
    required: Collection[str] = ()
    """Those of `keys` whose numbers a file must have: llama.cpp takes other values than the family where they are
    absent."""
    nonzero: Collection[str] = ()
    """Those of `keys` whose zero is refused. Elsewhere a zero is as if the key were absent, but the family takes a
    default for the fields of these."""
    eps: str = "rms_norm_eps"
    """The config.json field of the norms' epsilon. `rms_norm_eps` reads RMS_KEY, any other name LAYER_KEY; empty:
    no field."""
    says: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that have this value in all models of this architecture. No key of the file has them."""
    present: Mapping[str, str] = field(default_factory=dict)
    """Field -> role of a parameter, as in `tensor_name`. The field is true if the first layer has this parameter."""
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """All fields that were read -> further fields."""
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of parts of a layer that differ from the usual ones."""
    interleaved: bool = False
    """Whether llama.cpp's converter reorders rows of query and key heads so that RoPE rotates neighbours."""
    has_rope: bool = True
    rotates_part: bool = False
    """Whether there are models in which only a part of each head rotates."""
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Keys that Quire does not apply -> the values at which they change nothing. Other values are refused. An empty
    tuple accepts any value."""
    if_key: str = ""
    """If two families share an architecture: a key that only this family's files have."""

    def as_stored(self, spec: ArchSpec) -> ArchSpec:
        """Return the spec of the same model for weights as GGUF files store them: norm weights without an offset, and
        RoPE over neighbours if `interleaved`. The converter of GGUF files adds the offset, and may reorder rows."""
        layers = tuple(self._stored_layer(layer) for layer in spec.layers)
        return replace(spec, norm=replace(spec.norm, weight_offset=0.0), layers=layers)

    def _stored_layer(self, layer: LayerSpec) -> LayerSpec:
        """Return the layer with an interleaved RoPE if the map is `interleaved` and the layer rotates; else
        unchanged."""
        rope = layer.mixer.rope
        if not self.interleaved or rope is None:
            return layer
        return replace(layer, mixer=replace(layer.mixer, rope=replace(rope, interleaved=True)))

    def tensor_name(self, role: str, layer: int, found: Collection[str]) -> str:
        """Return the name of a parameter's tensor in a GGUF file: the first possible name that is among the file's
        tensors `found`, or the first of all if none is."""
        part, _, kind = role.rpartition(".")
        names = _MODEL.get(part) or tuple(f"blk.{layer}.{name}" for name in {**_LAYER, **self.parts}[part])
        return next((f"{name}.{kind}" for name in names if f"{name}.{kind}" in found), f"{names[0]}.{kind}")

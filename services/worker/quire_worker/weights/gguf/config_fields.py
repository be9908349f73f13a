"""Translates GGUF metadata to config.json fields, so that model families read one format.

A key of the architecture that is not read here is refused by name: the model would load, and answer wrongly. Knows
llama.cpp's keys; knows nothing of tensors' values beyond RoPE's divisors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from quire_common.errors import ConfigError, Unsupported
from quire_common.gguf import GgufModel, Metadata
from quire_common.gguf.token_ids import eos_token_ids, special_token_id
from quire_common.telemetry.logs import get_logger
from quire_worker.model.config_file import ConfigFile
from quire_worker.weights.gguf.architectures import ROPE_FACTORS, find_architecture
from quire_worker.weights.gguf.tensor_values import read_values

log = get_logger(__name__)

# Key of the file behind its architecture -> field of config.json.
_SIZES: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# The same of fields that are read one by one.
_FIELDS: Final = _SIZES | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "vocab_size": "vocab_size",
}
_READ: Final = {*_FIELDS, "attention.value_length", "rope.dimension_count"}
# Keys that change nothing in what is computed.
_SILENT: Final = {"rope.scaling.finetuned", "rope.scaling.original_context_length"}
# Keys that are accepted only with these values, which switch the feature off.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("", "Meta AI original pth"),
}
_FIX = "Serve another model, or its safetensors folder."


@dataclass(frozen=True, slots=True)
class GgufConfig(ConfigFile):
    """Fields of a GGUF file's metadata. Errors name the file's own keys, and a fix for this file."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """Field of config.json -> key of the file, for keys that the file has."""

    def section(self, name: str) -> ConfigFile | None:
        """A nested object, or None where absent."""
        found = ConfigFile.section(self, name)
        return None if found is None else GgufConfig(found.fields, self.source, self.keys)

    def bad(self, name: str, wanted: str, *, fix: str = "") -> ConfigError:
        """The error for a field that is absent or not what is wanted. `fix`: another than a good file."""
        wanted = re.sub(r"\w+", lambda word: self.keys.get(word[0], word[0]), wanted)
        cause = f"{self.source} lacks `{name}` ({wanted})."
        if self.has(name):
            cause = f"{self.source}: `{self.keys.get(name, name)}` is {repr(self.fields[name])[:80]}, not {wanted}."
        fix = fix or f"Download {self.source} again, or convert the model with a current llama.cpp."
        return ConfigError("BAD_CONFIG", cause, fix)


def read_config(model: GgufModel) -> ConfigFile:
    """The fields of a config.json. Raises ConfigError for metadata that is absent or wrong, Unsupported for what is not
    computed."""
    name, architecture = find_architecture(model)
    metadata = model.metadata
    _refuse_unread(name, metadata)
    fields: dict[str, Any] = {
        "architectures": [architecture.architecture],
        "model_type": architecture.model_type,
        "rms_norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocab_size(name, model),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "eos_token_id": list(eos_token_ids(metadata)),
        "bos_token_id": special_token_id(metadata, "bos"),
    }
    for key, own in _SIZES.items():
        fields[own] = metadata.integer(f"{name}.{key}", minimum=1)
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    fields["num_key_value_heads"] = metadata.integer(f"{name}.attention.head_count_kv", heads, minimum=1)
    fields["head_dim"] = _head_dim(name, metadata, max(1, hidden // heads))
    fields["rope_parameters"] = _rope(name, model, fields["head_dim"])
    if architecture.model_type == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in model.tensors
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in model.tensors
    if not fields["eos_token_id"]:
        log.warning("the file names no eos token: answers end at max_tokens or a stop string", path=str(metadata.path))
    keys = {own: f"{name}.{key}" for key, own in _FIELDS.items() if f"{name}.{key}" in metadata}
    return GgufConfig(fields, str(metadata.path), keys)


def _refuse_unread(name: str, metadata: Metadata) -> None:
    for key, value in metadata.values.items():
        own = key.removeprefix(f"{name}.")
        if own == key or own in _READ or own in _SILENT:
            continue
        # A list gives a value for each layer: it switches nothing off as a whole.
        if not isinstance(value, bool | int | float | str) or value not in _NEUTRAL.get(own, ()):
            raise _refused(metadata, key)


def _refused(metadata: Metadata, key: str) -> Unsupported:
    return Unsupported(
        "UNSUPPORTED_CONFIG",
        f"{metadata.path}: `{key}` is {metadata.shown(key)}, which asks for what is not supported.",
        _FIX,
        param=key,
    )


def _vocab_size(name: str, model: GgufModel) -> int:
    """Rows of the embedding; the metadata, where it says so, agrees."""
    place = model.tensors.get("token_embd.weight")
    told = model.metadata.integer(f"{name}.vocab_size", 0)
    rows = place.shape[0] if place is not None else told
    if told not in (0, rows):
        raise model.metadata.bad(f"{name}.vocab_size", f"the {rows} rows of token_embd.weight")
    return rows


def _head_dim(name: str, metadata: Metadata, default: int) -> int:
    """Of queries, keys and values alike, all of it rotated."""
    size = metadata.integer(f"{name}.attention.key_length", default, minimum=1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{name}.{key}", size) != size:
            raise _refused(metadata, f"{name}.{key}")
    return size


def _rope(name: str, model: GgufModel, head_dim: int) -> dict[str, Any]:
    """RoPE as `rope_parameters`. As in llama.cpp, the default type is linear, and a factor of 0 or 1 scales nothing."""
    metadata = model.metadata
    kind = metadata.text(f"{name}.rope.scaling.type", "linear")
    factor = metadata.number(f"{name}.rope.scaling.factor", 0.0)
    if kind == "linear" and factor in (0.0, 1.0):
        kind = "none"
    rope: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": metadata.number(f"{name}.rope.freq_base", 10000.0),
    }
    if kind != "none":
        rope["factor"] = factor
    place = model.tensors.get(ROPE_FACTORS)
    if place is not None:
        if kind != "none" or place.shape != (head_dim // 2,):
            raise Unsupported(
                "UNSUPPORTED_ROPE",
                f"{metadata.path}: {ROPE_FACTORS} of shape {list(place.shape)} beside the RoPE variant {kind!r} and "
                f"heads of {head_dim} is not supported.",
                _FIX,
            )
        rope |= {"rope_type": "factors", "factors": [float(value) for value in read_values(place)]}
    return rope

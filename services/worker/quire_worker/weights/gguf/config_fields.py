"""Translates GGUF metadata to config.json fields, so that model families read one format.

If this module does not read a key of the architecture, it refuses the file and names the key; otherwise the model would
load, and answer wrongly. This module knows llama.cpp's keys. The maps of the families have the differences between
architectures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from quire_common.errors import ConfigError
from quire_common.gguf import GgufModel, Metadata, TextArray
from quire_common.gguf.token_ids import eos_token_ids, special_token_id
from quire_common.telemetry.logs import get_logger
from quire_worker.model.architectures.common import MOST_LAYERS
from quire_worker.model.architectures.gguf_map import LAYER_KEY, RMS_KEY, GgufMap
from quire_worker.model.architectures.windows import FULL, SLIDING
from quire_worker.model.config_file import ConfigFile
from quire_worker.weights.gguf.architectures import find_architecture
from quire_worker.weights.gguf.refusals import refused
from quire_worker.weights.gguf.rope_fields import ROPE_KEYS, read_rope_fields

log = get_logger(__name__)

# Key of the file behind its architecture -> field of config.json.
_SIZES: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_PATTERN: Final = "attention.sliding_window_pattern"
_HEAD_SIZES: Final = {"attention.value_length", "rope.dimension_count"}
# The same of fields that are read one by one.
_FIELDS: Final = _SIZES | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
}
# Keys that change nothing in what is computed.
_SILENT: Final = {"rope.scaling.finetuned"}
# Keys that are accepted only with these values, which switch the feature off.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
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
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "tensor_data_layout": ("", "Meta AI original pth"),
}


@dataclass(frozen=True, slots=True)
class GgufConfig(ConfigFile):
    """Fields of a GGUF file's metadata. Errors name the file's own keys, and a fix for this file."""

    def section(self, name: str) -> ConfigFile | None:
        """Return a nested object, or None if it is absent."""
        found = ConfigFile.section(self, name)
        return None if found is None else GgufConfig(found.fields, self.source, self.keys)

    def bad(self, name: str, wanted: str, *, fix: str = "") -> ConfigError:
        """Make the ConfigError for a field that is absent, or has a wrong value under the file's own key; the caller
        raises it. `fix`: the fix that the error names, if it is not to get a good file."""
        wanted = re.sub(r"\w+", lambda word: self.keys.get(word[0], word[0]), wanted)
        cause = f"{self.source} lacks `{name}` ({wanted})."
        if self.has(name):
            cause = f"{self.source}: `{self.keys.get(name, name)}` is {repr(self.fields[name])[:80]}, not {wanted}."
        fix = fix or f"Download {self.source} again, or convert the model with a current llama.cpp."
        return ConfigError("BAD_CONFIG", cause, fix)


def read_config(model: GgufModel) -> ConfigFile:
    """Return the metadata of a GGUF file, and the factors in its RoPE tensors, as the fields of a config.json. Log a
    warning if the file names no eos token. Raises ConfigError for metadata that is absent or wrong, and Unsupported for
    a model that the worker does not compute."""
    family, files = find_architecture(model)
    name, metadata = files.architecture, model.metadata
    own = {**_eps(name, metadata, files), **files.keys}
    read = _FIELDS | own | (ROPE_KEYS if files.has_rope else {})
    _refuse_unread(name, metadata, read, files)
    for key in files.required:
        metadata.number(f"{name}.{key}")
    fields: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_type,
        "vocab_size": _vocab_size(name, model),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "eos_token_id": list(eos_token_ids(metadata)),
        "bos_token_id": special_token_id(metadata, "bos"),
        **files.says,
    }
    for key, field in _SIZES.items():
        fields[field] = metadata.integer(f"{name}.{key}", minimum=1)
    if fields["num_hidden_layers"] > MOST_LAYERS:
        raise metadata.bad(f"{name}.block_count", f"at most {MOST_LAYERS}")
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    fields["num_key_value_heads"] = metadata.integer(f"{name}.attention.head_count_kv", heads, minimum=1)
    fields |= _head_sizes(name, model, files, max(1, hidden // heads), fields["max_position_embeddings"])
    for key, field in own.items():
        if f"{name}.{key}" not in metadata:
            continue
        if not _is_off(key, metadata.values[f"{name}.{key}"]):
            fields[field] = _value(metadata, f"{name}.{key}", fields["num_hidden_layers"])
        elif key in files.nonzero:
            raise refused(metadata, f"{name}.{key}")
    for field, role in files.present.items():
        fields[field] = files.tensor_name(role, 0, model.tensors.keys()) in model.tensors
    if files.derive is not None:
        fields |= files.derive(fields)
    if not fields["eos_token_id"]:
        log.warning("the file names no eos token: answers end at max_tokens or a stop string", path=str(metadata.path))
    keys = {field: f"{name}.{key}" for key, field in read.items() if f"{name}.{key}" in metadata}
    return GgufConfig(fields, str(metadata.path), keys)


def _eps(name: str, metadata: Metadata, files: GgufMap) -> dict[str, str]:
    """Return {key of the norms' epsilon: its field}, or {} for a family that reads none. Raises ConfigError if the file
    lacks the key."""
    if not files.eps:
        return {}
    key = RMS_KEY if files.eps == "rms_norm_eps" else LAYER_KEY
    metadata.number(f"{name}.{key}")
    return {key: files.eps}


def _refuse_unread(name: str, metadata: Metadata, read: Mapping[str, str], files: GgufMap) -> None:
    """Raise Unsupported for a key of the architecture that is not read, unless its value switches its feature off or
    the key changes nothing."""
    for key, value in metadata.values.items():
        own = key.removeprefix(f"{name}.")
        if own == key or own in read or own in _SILENT or own in _HEAD_SIZES:
            continue
        allowed = files.neutral.get(own, _NEUTRAL.get(own, ()))
        # A list gives a value for each layer: it switches nothing off as a whole.
        if not isinstance(value, bool | int | float | str) or not (
            value in allowed or (own in files.neutral and not allowed) or _is_near(value, allowed)
        ):
            raise refused(metadata, key)


def _is_near(value: object, allowed: tuple[object, ...]) -> bool:
    """Whether a number is one of these, apart from rounding to float32 in files."""
    return isinstance(value, float) and any(
        isinstance(each, float) and math.isclose(value, each, rel_tol=1e-6) for each in allowed
    )


def _is_off(key: str, value: object) -> bool:
    """Whether a value has the same effect as an absent key: a zero of _NEUTRAL."""
    return isinstance(value, bool | int | float) and not value and value in _NEUTRAL.get(key, ())


def _value(metadata: Metadata, key: str, layers: int) -> object:
    """Return the value of a key in the form of config.json. A pattern of layers with windows becomes `layer_types`: a
    list of flags item by item, whatever its length, or a group size for all `layers`, where by llama.cpp's rule the
    last layer of each group has no window. Raises ConfigError for another pattern or a group size of 0, and Unsupported
    for a list under another key."""
    value = metadata.values[key]
    if key.endswith(_PATTERN):
        every = metadata.integer(key) if not isinstance(value, np.ndarray) else 0
        windows = metadata.flags(key) if not every else [(layer + 1) % every != 0 for layer in range(layers)]
        return [SLIDING if each else FULL for each in windows]
    if isinstance(value, np.ndarray | TextArray):
        raise refused(metadata, key)
    return value


def _vocab_size(name: str, model: GgufModel) -> int:
    """Return the number of rows of the embedding; without an embedding, the number in the metadata, or 0. Raises
    ConfigError if both differ, unless the metadata's is 0."""
    place = model.tensors.get("token_embd.weight")
    told = model.metadata.integer(f"{name}.vocab_size", 0)
    rows = place.shape[0] if place is not None else told
    if told not in (0, rows):
        raise model.metadata.bad(f"{name}.vocab_size", f"the {rows} rows of token_embd.weight")
    return rows


def _head_sizes(name: str, model: GgufModel, files: GgufMap, default: int, positions: int) -> dict[str, Any]:
    """Return the fields of the head size, the same for queries, keys and values, and of RoPE, if the family has it.
    `default` is the head size if the file has none; `positions` is the context length, for RoPE.

    Raises Unsupported if values have another size. All of a head must rotate, unless the family has models that rotate
    only a part.
    """
    metadata = model.metadata
    size = metadata.integer(f"{name}.attention.key_length", default, minimum=1)
    if metadata.integer(f"{name}.attention.value_length", size) != size:
        raise refused(metadata, f"{name}.attention.value_length")
    rotated = metadata.integer(f"{name}.rope.dimension_count", size)
    if rotated != size and not (files.rotates_part and 0 < rotated < size):
        raise refused(metadata, f"{name}.rope.dimension_count")
    if not files.has_rope:
        return {"head_dim": size}
    rope = read_rope_fields(name, model, rotated, positions)
    if files.rotates_part:
        rope["partial_rotary_factor"] = rotated / size
    return {"head_dim": size, "rope_parameters": rope}

"""A GGUF file's metadata as the config that a model folder would have, so that families read one form alone.

A key that says something about the architecture and is not read here is refused by name: the model would load, and
answer wrongly. Knows llama.cpp's keys; knows nothing of tensors' values beyond RoPE's divisors.
"""

from __future__ import annotations

from typing import Any, Final

from quire_common.errors import Unsupported
from quire_common.gguf import GgufModel, Metadata
from quire_common.gguf.token_ids import end_token_ids, token_id
from quire_worker.model.config_file import ConfigFile
from quire_worker.weights.gguf.architectures import ROPE_FACTORS, find_architecture
from quire_worker.weights.gguf.tensor_values import read_values

# Key of the file behind its architecture -> field of config.json.
_SIZES: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# Keys that are read below, and those that say nothing about what is computed.
_READ: Final = {
    *_SIZES,
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "vocab_size",
}
_SILENT: Final = {"rope.scaling.finetuned", "rope.scaling.original_context_length"}
# Keys whose value asks for nothing.
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


def read_config(model: GgufModel) -> ConfigFile:
    """The config; ConfigError for what is absent or wrong, Unsupported for what is not computed."""
    name, architecture = find_architecture(model)
    metadata = model.metadata
    _refuse_unread(name, metadata)
    fields: dict[str, Any] = {
        "architectures": [architecture.architecture],
        "model_type": architecture.model_type,
        "rms_norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocab_size(name, model),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "eos_token_id": list(end_token_ids(metadata)),
        "bos_token_id": token_id(metadata, "bos"),
    }
    for key, field in _SIZES.items():
        fields[field] = metadata.integer(f"{name}.{key}", minimum=1)
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    fields["num_key_value_heads"] = metadata.integer(f"{name}.attention.head_count_kv", heads, minimum=1)
    fields["head_dim"] = _head_dim(name, metadata, max(1, hidden // heads))
    fields["rope_parameters"] = _rope(name, model, fields["head_dim"])
    if architecture.model_type == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in model.tensors
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in model.tensors
    return ConfigFile(fields, str(metadata.path))


def _refuse_unread(name: str, metadata: Metadata) -> None:
    for key, value in metadata.values.items():
        own = key.removeprefix(f"{name}.")
        if own == key or own in _READ or own in _SILENT:
            continue
        if own not in _NEUTRAL or not any(value is each or value == each for each in _NEUTRAL[own]):
            raise _refused(metadata, key)


def _refused(metadata: Metadata, key: str) -> Unsupported:
    shown = repr(metadata.values[key])[:80]
    return Unsupported(
        "UNSUPPORTED_CONFIG",
        f"{metadata.path}: `{key}` is {shown}, which asks for what is not supported.",
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
    metadata = model.metadata
    kind = metadata.text(f"{name}.rope.scaling.type", "none")
    rope: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": metadata.number(f"{name}.rope.freq_base", 10000.0),
    }
    if kind != "none":
        rope["factor"] = metadata.number(f"{name}.rope.scaling.factor")
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

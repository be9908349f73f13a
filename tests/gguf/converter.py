"""Converts a model folder of transformers to a GGUF file, as llama.cpp's converter does.

The gguf package's tables give the names of tensors from those of transformers, and its writer the names of keys. What
the converter does to values is written down here, after llama.cpp's conversion scripts: which rows it reorders, which
norm weights it adds 1 to, and which keys it writes for each architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    TensorNameMap,
    get_tensor_name_map,
    quantize,
)
from safetensors.torch import load_file
from torch import Tensor

from tests.oracle import quiet_transformers

Config = Mapping[str, Any]
Weights = dict[str, Tensor]
Changed = Callable[[Config, str, Tensor], Tensor]


def first(config: Config, *names: str, default: Any = None) -> Any:
    """The first field that is there and not null."""
    return next((config[name] for name in names if config.get(name) is not None), default)


def hidden_of(config: Config) -> int:
    size: int = first(config, "hidden_size", "n_embd", "d_model")
    return size


def heads_of(config: Config) -> int:
    count: int = first(config, "num_attention_heads", "n_head", "n_heads")
    return count


def kv_heads_of(config: Config) -> int:
    count: int = first(config, "num_kv_heads", "num_key_value_heads", default=heads_of(config))
    return count


def rope_of(config: Config) -> Config:
    section: dict[str, Any] = config.get("rope_parameters") or {}
    found: dict[str, Any] = section.get("full_attention", section)
    return found


def rotated_of(config: Config) -> int:
    head_dim = first(config, "head_dim", default=hidden_of(config) // heads_of(config))
    return int(rope_of(config).get("partial_rotary_factor", 1.0) * head_dim)


def as_it_is(config: Config, name: str, values: Tensor) -> Tensor:
    return values


def neighbours(config: Config, name: str, values: Tensor) -> Tensor:
    """Rows of query and key heads, from halves to neighbours (LlamaModel.permute)."""
    for part, heads in (("q_proj", heads_of(config)), ("k_proj", kv_heads_of(config))):
        if f".{part}." in name:
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            return halves.swapaxes(1, 2).reshape(values.shape)
    return values


def norms_plus_one(config: Config, name: str, values: Tensor) -> Tensor:
    return values + 1 if name.endswith("norm.weight") else values


def plain_qkv(config: Config, name: str, values: Tensor) -> Tensor:
    """Queries, keys and values one after the other, from an order by KV head."""
    if "query_key_value" not in name:
        return values
    kv_heads = config.get("num_kv_heads") if config.get("new_decoder_architecture") else None
    if config["model_type"] == "falcon":
        kv_heads = kv_heads or (1 if config.get("multi_query") else heads_of(config))
    kv_heads = kv_heads or heads_of(config)
    group = heads_of(config) // kv_heads
    by_head = values.reshape(kv_heads, group + 2, -1, *values.shape[1:])
    parts = (by_head[:, :group], by_head[:, group : group + 1], by_head[:, group + 1 :])
    return torch.cat([part.reshape(-1, *values.shape[1:]) for part in parts])


def transposed(config: Config, name: str, values: Tensor) -> Tensor:
    return values.T if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")) else values


@dataclass(frozen=True)
class Conversion:
    """The steps of the converter for one architecture."""

    architecture: MODEL_ARCH
    values: Changed = as_it_is
    keys: Callable[[GGUFWriter, Config], object] = lambda writer, config: None
    """Writes keys beyond those of all architectures."""
    wide: bool = False
    """The width of the MLP is four times that of the model."""
    has_rope: bool = True


def llama_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(first(config, "head_dim", default=hidden_of(config) // heads_of(config)))


def partial_rope(writer: GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(rotated_of(config))


def granite_keys(writer: GGUFWriter, config: Config) -> None:
    llama_keys(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def minicpm_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def hunyuan_keys(writer: GGUFWriter, config: Config) -> None:
    rope, dim = rope_of(config), config["head_dim"]
    writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)))
    writer.add_rope_scaling_type(RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)
    writer.add_rope_scaling_orig_ctx_len(256)


def gemma2_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def window_and_pattern(writer: GGUFWriter, config: Config) -> None:
    if config.get("sliding_window") is not None:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def phi3_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    partial_rope(writer, config)
    writer.add_sliding_window(config.get("sliding_window") or 0)
    rope = rope_of(config)
    if rope.get("rope_type") == "longrope":
        scale = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(scale) / math.log(config["original_max_position_embeddings"]))
        )
        for tensor in ("long", "short"):
            writer.add_tensor(f"rope_factors_{tensor}.weight", torch.tensor(rope[f"{tensor}_factor"]).float().numpy())


def cohere2_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_vocab_size(config["vocab_size"])
    partial_rope(writer, config)
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def cohere_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def olmo_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_layer_norm_eps(1e-5)
    writer.add_clamp_kqv(config["clip_qkv"])


def gpt_neox_keys(writer: GGUFWriter, config: Config) -> None:
    partial_rope(writer, config)
    writer.add_parallel_residual(config["use_parallel_residual"])


def stablelm_keys(writer: GGUFWriter, config: Config) -> None:
    """The converter takes an absent flag for true."""
    partial_rope(writer, config)
    writer.add_parallel_residual(True)


def mpt_keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
    writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])


# By the name of the family in transformers.
CONVERSIONS = {
    "Llama": Conversion(MODEL_ARCH.LLAMA, neighbours, llama_keys),
    "Qwen2": Conversion(MODEL_ARCH.QWEN2),
    "Qwen3": Conversion(MODEL_ARCH.QWEN3),
    "Granite": Conversion(MODEL_ARCH.GRANITE, neighbours, granite_keys),
    "SeedOss": Conversion(MODEL_ARCH.SEED_OSS),
    "SmolLM3": Conversion(MODEL_ARCH.SMOLLM3, neighbours, llama_keys),
    "HunYuanDenseV1": Conversion(MODEL_ARCH.HUNYUAN_DENSE, keys=hunyuan_keys),
    "Gemma": Conversion(MODEL_ARCH.GEMMA, norms_plus_one),
    "Gemma2": Conversion(MODEL_ARCH.GEMMA2, norms_plus_one, gemma2_keys),
    "Gemma3": Conversion(
        MODEL_ARCH.GEMMA3, norms_plus_one, lambda writer, config: writer.add_sliding_window(config["sliding_window"])
    ),
    "Phi": Conversion(MODEL_ARCH.PHI2, keys=partial_rope),
    "Phi3": Conversion(MODEL_ARCH.PHI3, keys=phi3_keys),
    "Glm": Conversion(MODEL_ARCH.CHATGLM, keys=partial_rope),
    "Glm4": Conversion(MODEL_ARCH.GLM4, keys=partial_rope),
    "Olmo": Conversion(MODEL_ARCH.OLMO, neighbours, olmo_keys),
    "Olmo2": Conversion(MODEL_ARCH.OLMO2),
    "Olmo3": Conversion(MODEL_ARCH.OLMO2, keys=window_and_pattern),
    "Cohere": Conversion(MODEL_ARCH.COMMAND_R, keys=cohere_keys),
    "Cohere2": Conversion(MODEL_ARCH.COHERE2, keys=cohere2_keys),
    "Starcoder2": Conversion(MODEL_ARCH.STARCODER2),
    "GPT2": Conversion(MODEL_ARCH.GPT2, transposed, has_rope=False),
    "GPTNeoX": Conversion(MODEL_ARCH.GPTNEOX, plain_qkv, gpt_neox_keys),
    "Bloom": Conversion(MODEL_ARCH.BLOOM, plain_qkv, wide=True, has_rope=False),
    "Falcon": Conversion(
        MODEL_ARCH.FALCON, plain_qkv, lambda writer, config: writer.add_tensor_data_layout("jploski"), wide=True
    ),
    "Mpt": Conversion(MODEL_ARCH.MPT, keys=mpt_keys, wide=True, has_rope=False),
    "StableLm": Conversion(MODEL_ARCH.STABLELM, keys=stablelm_keys),
    "Exaone4": Conversion(MODEL_ARCH.EXAONE4, keys=window_and_pattern),
    "Nemotron": Conversion(MODEL_ARCH.NEMOTRON, norms_plus_one, partial_rope),
    "Arcee": Conversion(MODEL_ARCH.ARCEE, neighbours, llama_keys),
}


# Models that transformers does not have: the family whose code computes the same.
ALIKE = {
    "internlm2": ("llama", Conversion(MODEL_ARCH.INTERNLM2, neighbours)),
    "exaone": ("llama", Conversion(MODEL_ARCH.EXAONE, keys=partial_rope)),
    "minicpm": ("granite", Conversion(MODEL_ARCH.MINICPM, neighbours, minicpm_keys)),
}


def convert(
    conversion: Conversion,
    folder: Path,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    fused: bool = False,
) -> Path:
    """Write the model of a folder as a GGUF file, and return its path. `kind`: of the blocks of matrices. `fused`:
    queries, keys and values in one tensor."""
    with quiet_transformers():
        from transformers import AutoConfig

        config: Config = AutoConfig.from_pretrained(folder).to_dict()
    weights = load_file(folder / "model.safetensors")
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[conversion.architecture])
    _add_sizes(writer, config, conversion)
    conversion.keys(writer, config)
    # transformers takes the size of the vocabulary from here.
    writer.add_token_list([str(number) for number in range(config["vocab_size"])])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    table = get_tensor_name_map(conversion.architecture, _layers(config))
    found = {
        _gguf_name(table, name): conversion.values(config, name, values.float())
        for name, values in _kept(weights, config).items()
    }
    for name, values in (_fused(found) if fused else found).items():
        stored = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values.contiguous().numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: GGUFWriter, config: Config, conversion: Conversion) -> None:
    hidden, rope = hidden_of(config), rope_of(config)
    writer.add_context_length(
        first(config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=2048)
    )
    writer.add_embedding_length(hidden)
    writer.add_block_count(_layers(config))
    writer.add_feed_forward_length(
        4 * hidden if conversion.wide else first(config, "intermediate_size", "n_inner", default=4 * hidden)
    )
    writer.add_head_count(heads_of(config))
    kv_heads = kv_heads_of(config)
    if config["model_type"] == "falcon" and not config["new_decoder_architecture"]:
        kv_heads = 1
    writer.add_head_count_kv(kv_heads)
    if (eps := first(config, "rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")) is not None:
        writer.add_layer_norm_eps(eps)
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if conversion.has_rope and "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _layers(config: Config) -> int:
    count: int = first(config, "num_hidden_layers", "n_layer", "n_layers")
    return count


def _kept(weights: Weights, config: Config) -> Weights:
    """The weights that the converter writes."""
    kept = {name: values for name, values in weights.items() if not name.endswith((".attn.bias", ".masked_bias"))}
    if config.get("tie_word_embeddings"):
        kept.pop("lm_head.weight", None)
    return kept


def _fused(weights: Weights) -> Weights:
    found = dict(weights)
    for name in [name for name in weights if ".attn_q." in name]:
        parts = [found.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        found[name.replace("attn_q", "attn_qkv")] = torch.cat(parts)
    return found


def _gguf_name(table: TensorNameMap, name: str) -> str:
    """The name by the gguf package's table. Raises KeyError where the table has none."""
    for known in (name, name.removeprefix("transformer.")):
        found = table.get_name(known, try_suffixes=(".weight", ".bias"))
        if found is not None:
            return found
    raise KeyError(f"no name for {name}")

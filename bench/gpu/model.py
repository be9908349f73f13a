"""Makes a model folder with a real shape's config.json and a tokenizer, and with random weights or none, for GPU
benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from quire_worker.model.arch_spec import ArchSpec, RopeSpec
from quire_worker.model.architectures import find_family
from quire_worker.model.config_file import ConfigFile
from quire_worker.model.parameters import parameter_specs

_DEVIATION = 0.02
"""Standard deviation of random weights, as where models are trained from nothing."""


def write_config(folder: Path, spec: ArchSpec, context: int) -> Path:
    """Write a folder that describes the shape, without weights."""
    rope_spec = spec.attention[0].rope or RopeSpec()
    rope: dict[str, object] = {"rope_type": rope_spec.kind, "rope_theta": rope_spec.theta}
    if rope_spec.kind == "llama3":
        rope |= {
            "factor": rope_spec.factor,
            "low_freq_factor": rope_spec.low_freq_factor,
            "high_freq_factor": rope_spec.high_freq_factor,
            "original_max_position_embeddings": rope_spec.original_max_positions,
        }
    fields = {
        "architectures": [spec.architecture],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": context,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm.eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "rope_parameters": rope,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    # A word for every id, so that every token of a random model is text and has an event of its own.
    tokenizer = Tokenizer(WordLevel({f"w{each}": each for each in range(spec.vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_shards(folder: Path, shard_bytes: int, device: str) -> None:
    """Write bf16 weights for the config.json in the folder, normally distributed, as safetensors files of at least
    `shard_bytes` each (the last one may be smaller) with an index. `device` makes the random numbers."""
    config = ConfigFile(json.loads((folder / "config.json").read_text()))
    architecture, family = find_family(config)
    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    specs = parameter_specs(family.build_spec(architecture, config))
    for spec in specs:
        name = family.tensor_name(spec.role, spec.layer)
        weights = torch.empty(spec.shape, dtype=torch.bfloat16, device=device)
        shard[name] = weights.normal_(0, _DEVIATION, generator=generator).cpu()
        if spec is specs[-1] or sum(each.nbytes for each in shard.values()) >= shard_bytes:
            file_name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
            save_file(shard, str(folder / file_name))
            weight_map |= dict.fromkeys(shard, file_name)
            shard.clear()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

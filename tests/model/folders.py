"""Tiny model folders: config.json alone (for dummy weights), or with safetensors written from those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire_worker.loading import LoadedModel, LoadOptions, load_model
from quire_worker.model.architectures import find_family
from quire_worker.model.config_file import ConfigFile
from quire_worker.model.parameters import parameter_specs
from quire_worker.sources.family import FamilySource, family_source
from quire_worker.sources.model_files import open_model

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 37,
    "max_window_layers": 1,
}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True}
# Heads of 12 are beyond the compiled kernels: torch computes them. The others go through the kernels.
FAMILIES = {"llama": LLAMA, "llama-32": LLAMA | {"head_dim": 32}, "qwen2": QWEN2, "qwen3": QWEN3}


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in (TINY | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def load_dummy_model(folder: Path, *, kv_cache_bytes: int = 4 << 20, **changes: Any) -> LoadedModel:
    write_config(folder, **changes)
    return load_model(folder, LoadOptions(load_format="dummy", seed=1, kv_cache_bytes=kv_cache_bytes))


def read_source(model: str | Path, options: LoadOptions | None = None) -> FamilySource:
    """A folder or GGUF file of a family of Quire's own, without its weights."""
    options = options or LoadOptions()
    return family_source(open_model(model, options, lambda *_: None), options)


def random_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors under the names that the folder's config implies."""
    config = ConfigFile(json.loads((folder / "config.json").read_text()))
    architecture, family = find_family(config)
    generator = torch.Generator().manual_seed(3)
    return {
        family.tensor_name(each.role, each.layer): torch.randn(each.shape, generator=generator).mul(0.1).bfloat16()
        for each in parameter_specs(family.build_spec(architecture, config))
    }


def write_single(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def write_sharded(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 3) -> None:
    names = sorted(tensors)
    place = {name: f"model-{1 + index % shards:05d}-of-{shards:05d}.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(place.values())):
        save_file({name: tensors[name] for name in names if place[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

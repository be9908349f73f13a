"""Makes a model folder with a real shape's config.json and a tokenizer, and without weights, for GPU benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from quire_worker.model.arch_spec import ArchSpec, RopeSpec


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

"""Tiny GGUF models of random weights, written by the gguf package under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from numpy.typing import NDArray

from tests.gguf.vocabularies import TextFile

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 331, 64, 96, 3, 8, 2, 512
Weights = dict[str, NDArray[np.float32]]


@dataclass
class TinyModel:
    """One file. `change` may alter tensors and `fields` before they are written."""

    architecture: str = "llama"
    head_dim: int = 8
    tied: bool = False
    kind: GGMLQuantizationType = GGMLQuantizationType.F32
    vocab: int = VOCAB
    text: TextFile | None = None
    """The tokenizer, if there is to be one."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Keys behind the architecture; None leaves one out."""
    change: Callable[[Weights], object] = lambda weights: None

    def write(self, path: Path) -> Path:
        """Write the file, and return its path."""
        writer = GGUFWriter(path, self.architecture)
        for key, value in (self._fields() | self.fields).items():
            if isinstance(value, float):
                writer.add_float32(f"{self.architecture}.{key}", value)
            elif isinstance(value, str):
                writer.add_string(f"{self.architecture}.{key}", value)
            elif isinstance(value, list):
                writer.add_array(f"{self.architecture}.{key}", value)
            elif value is not None:
                writer.add_uint32(f"{self.architecture}.{key}", value)
        if self.text is not None:
            self.text.add_to(writer)
        else:
            writer.add_eos_token_id(2)
            writer.add_eot_token_id(5)
        weights = self.weights()
        self.change(weights)
        for name, values in weights.items():
            kind = self.kind if values.ndim == 2 and values.shape[1] % 32 == 0 else GGMLQuantizationType.F32
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "context_length": CONTEXT,
            "embedding_length": HIDDEN,
            "block_count": LAYERS,
            "feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 5000.0,
            "vocab_size": self.vocab,
        }
        if self.architecture == "llama":
            found["rope.dimension_count"] = self.head_dim
        if self.head_dim * HEADS != HIDDEN:
            found |= {"attention.key_length": self.head_dim, "attention.value_length": self.head_dim}
        return found

    def weights(self) -> Weights:
        """Random tensors, in the file's order."""
        random = np.random.default_rng(len(self.architecture) + self.head_dim)

        def normal(*shape: int) -> NDArray[np.float32]:
            return (random.normal(size=shape) * 0.2).astype(np.float32)

        def norm(size: int) -> NDArray[np.float32]:
            return 1 + normal(size)

        found = {"token_embd.weight": normal(self.vocab, HIDDEN)}
        queries, keys = HEADS * self.head_dim, KV_HEADS * self.head_dim
        for layer in range(LAYERS):
            own: Weights = {
                "attn_norm.weight": norm(HIDDEN),
                "attn_q.weight": normal(queries, HIDDEN),
                "attn_k.weight": normal(keys, HIDDEN),
                "attn_v.weight": normal(keys, HIDDEN),
                "attn_output.weight": normal(HIDDEN, queries),
                "ffn_norm.weight": norm(HIDDEN),
                "ffn_gate.weight": normal(INNER, HIDDEN),
                "ffn_up.weight": normal(INNER, HIDDEN),
                "ffn_down.weight": normal(HIDDEN, INNER),
            }
            if self.architecture == "qwen2":
                own |= {"attn_q.bias": normal(queries), "attn_k.bias": normal(keys), "attn_v.bias": normal(keys)}
            if self.architecture == "qwen3":
                own |= {"attn_q_norm.weight": norm(self.head_dim), "attn_k_norm.weight": norm(self.head_dim)}
            found |= {f"blk.{layer}.{name}": values for name, values in own.items()}
        found["output_norm.weight"] = norm(HIDDEN)
        if not self.tied:
            found["output.weight"] = normal(self.vocab, HIDDEN)
        return found

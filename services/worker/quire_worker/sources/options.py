"""Options of a model that is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
Quantize = Literal["none", "int8"]
ModelImpl = Literal["auto", "quire", "transformers"]
Progress = Callable[[str, int, int], None]
"""(phase: config, weights, pages, kernels; done_bytes; total_bytes), called by one thread at a time, which need not be
the one that loads."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a model."""

    load_format: LoadFormat = "auto"
    model_impl: ModelImpl = "auto"
    """The implementation of the layers: a family of Quire's own (quire), the Transformers backend (transformers), or
    the first of these that has the architecture (auto)."""
    seed: int = 0
    """Seed of dummy weights."""
    page_size: int = 16
    kv_cache_bytes: int = 256 << 20
    max_model_len: int = 0
    """0: the model's own context."""
    attention_backend: str = "auto"
    """See ops.backends."""
    kv_cache_dtype: str = "auto"
    """Or fp8, fp8_e4m3."""
    dtype: DType = "auto"
    """bfloat16, float16: linear and embedding weights of a wider or another float type are rounded to it."""
    quantize: Quantize = "none"
    """int8: linear and embedding weights of floats become int8 blocks."""
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields that replace those of config.json; null removes one."""

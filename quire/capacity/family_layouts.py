"""The layouts of model families, as far as they differ from Llama's: names of fields, defaults, and matrices.

The worker's registry of families is the source. This package cannot import the worker, so
tests/parity/test_plan_sizes.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class FamilyLayout:
    """The layout of one family. The defaults are those of Llama."""

    gated: bool = True
    """Whether the MLP has three matrices; otherwise it has two."""
    output_gate: bool = False
    """Whether attention has one more projection, as large as the query projection."""
    extra_positions: int | None = None
    """Rows of the position embeddings in addition to the context; None: there are no position embeddings."""
    default_tied: bool = False
    """Whether input and output embeddings are one matrix if config.json does not say."""
    default_head_dim: int = 0
    """The size of a head if config.json does not have the field; 0: hidden_size / heads."""
    default_mlp_ratio: int = 0
    """The width of the MLP, in multiples of hidden_size, if config.json does not say; 0: config.json must have the
    field."""
    default_context: int | None = None
    """The context if config.json does not say; None: config.json must have the field."""
    falcon_kv_heads: bool = False
    """Whether the KV heads come from Falcon's fields `new_decoder_architecture`, `num_kv_heads` and `multi_query`;
    otherwise they come from `num_key_value_heads`."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Maps the family's field names to Llama's."""

    def adapt(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields by Llama's names. If config.json has a field under both names, the one that is not null
        counts, or the later one of two values."""
        adapted: dict[str, Any] = {}
        for name, value in fields.items():
            llama_name = self.renamed.get(name, name)
            if value is not None or adapted.get(llama_name) is None:
                adapted[llama_name] = value
        return adapted


_GPT: Final = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
_BLOOM: Final = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "seq_length": "max_position_embeddings",
}
_FALCON: Final = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "ffn_hidden_size": "intermediate_size",
}
_MPT: Final = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}
_LLAMA: Final = FamilyLayout()
_UNGATED: Final = FamilyLayout(gated=False)
_TIED: Final = FamilyLayout(default_tied=True)
_GEMMA: Final = FamilyLayout(default_tied=True, default_head_dim=256)
_HEAD_DIM_128: Final = FamilyLayout(default_head_dim=128)
# By `model_type` of config.json.
_LAYOUTS: Final[Mapping[str, FamilyLayout]] = {
    "afmoe": FamilyLayout(output_gate=True, default_head_dim=128),
    "arcee": _UNGATED,
    "bloom": FamilyLayout(gated=False, default_tied=True, default_mlp_ratio=4, default_context=2048, renamed=_BLOOM),
    "cohere": _TIED,
    "cohere2": _TIED,
    "falcon": FamilyLayout(
        gated=False, default_tied=True, default_mlp_ratio=4, default_context=2048, falcon_kv_heads=True, renamed=_FALCON
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "glm": _HEAD_DIM_128,
    "glm4": _HEAD_DIM_128,
    "gpt2": FamilyLayout(gated=False, extra_positions=0, default_tied=True, default_mlp_ratio=4, renamed=_GPT),
    "gpt_neox": _UNGATED,
    "gptj": FamilyLayout(gated=False, default_mlp_ratio=4, renamed=_GPT),
    "mpt": FamilyLayout(gated=False, default_tied=True, default_mlp_ratio=4, renamed=_MPT),
    "nemotron": _UNGATED,
    "opt": FamilyLayout(gated=False, extra_positions=2, default_tied=True, renamed={"ffn_dim": "intermediate_size"}),
    "persimmon": _UNGATED,
    "phi": _UNGATED,
    "qwen3": _HEAD_DIM_128,
    "qwen3_next": FamilyLayout(output_gate=True, default_head_dim=256),
    "seed_oss": _HEAD_DIM_128,
    "smollm3": _TIED,
    "starcoder2": FamilyLayout(gated=False, default_tied=True),
}


def layout_of(fields: Mapping[str, Any]) -> FamilyLayout:
    """Return the layout of the family that `model_type` in a config names; Llama's for any other."""
    return _LAYOUTS.get(str(fields.get("model_type")), _LLAMA)

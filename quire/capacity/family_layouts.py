"""The layouts of model families, as far as they differ from Llama's: names of fields, defaults, and matrices.

The worker's registry of families says the same and more. This package does not import the worker; a test compares both.
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
    """Whether attention has one more matrix, of the size of that of the queries."""
    extra_positions: int | None = None
    """Rows of the position embeddings in addition to the context; None: there are no position embeddings."""
    tied: bool = False
    """Whether input and output embeddings are one matrix if config.json does not say."""
    head_dim: int = 0
    """The size of a head if config.json does not have the field; 0: hidden_size / heads."""
    mlp_ratio: int = 0
    """The width of the MLP, in multiples of hidden_size, if config.json does not say; 0: it must."""
    context: int | None = None
    """The context if config.json does not say; None: it must."""
    multi_query: bool = False
    """Whether the number of KV heads follows from Falcon's fields."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The family's name of a field -> Llama's."""

    def adapt(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields by Llama's names. A null does not replace a value."""
        adapted: dict[str, Any] = {}
        for name, value in fields.items():
            usual = self.renamed.get(name, name)
            if value is not None or adapted.get(usual) is None:
                adapted[usual] = value
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
_PLAIN: Final = FamilyLayout(gated=False)
_TIED: Final = FamilyLayout(tied=True)
_GEMMA: Final = FamilyLayout(tied=True, head_dim=256)
_HEADS_OF_128: Final = FamilyLayout(head_dim=128)
# By `model_type` of config.json.
_LAYOUTS: Final[Mapping[str, FamilyLayout]] = {
    "afmoe": FamilyLayout(output_gate=True, head_dim=128),
    "arcee": _PLAIN,
    "bloom": FamilyLayout(gated=False, tied=True, mlp_ratio=4, context=2048, renamed=_BLOOM),
    "cohere": _TIED,
    "cohere2": _TIED,
    "falcon": FamilyLayout(gated=False, tied=True, mlp_ratio=4, context=2048, multi_query=True, renamed=_FALCON),
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "glm": _HEADS_OF_128,
    "glm4": _HEADS_OF_128,
    "gpt2": FamilyLayout(gated=False, extra_positions=0, tied=True, mlp_ratio=4, renamed=_GPT),
    "gpt_neox": _PLAIN,
    "gptj": FamilyLayout(gated=False, mlp_ratio=4, renamed=_GPT),
    "mpt": FamilyLayout(gated=False, tied=True, mlp_ratio=4, renamed=_MPT),
    "nemotron": _PLAIN,
    "opt": FamilyLayout(gated=False, extra_positions=2, tied=True, renamed={"ffn_dim": "intermediate_size"}),
    "persimmon": _PLAIN,
    "phi": _PLAIN,
    "qwen3": _HEADS_OF_128,
    "qwen3_next": FamilyLayout(output_gate=True, head_dim=256),
    "seed_oss": _HEADS_OF_128,
    "smollm3": _TIED,
    "starcoder2": FamilyLayout(gated=False, tied=True),
}


def layout_of(fields: Mapping[str, Any]) -> FamilyLayout:
    """Return the layout of the family that `model_type` in a config names; Llama's for any other."""
    return _LAYOUTS.get(str(fields.get("model_type")), _LLAMA)

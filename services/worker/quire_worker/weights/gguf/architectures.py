"""How one GGUF architecture maps to a model family, and how GGUF files name tensors.

An entry is data. Adding one takes a row here, and its family in `model.architectures`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from quire_common.errors import Unsupported
from quire_common.gguf import GgufModel


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """How one GGUF architecture maps to a model family."""

    architecture: str
    """Its name in `architectures` of config.json."""
    model_type: str
    rotates_neighbours: bool
    """Whether rows of query and key heads are stored so that RoPE rotates neighbours. The decoder rotates halves."""


ARCHITECTURES: Final = MappingProxyType(
    {
        "llama": GgufArchitecture("LlamaForCausalLM", "llama", True),
        "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2", False),
        "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3", False),
    }
)

_LAYER: Final = {
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
# Role of a parameter -> name in the file; {layer} is the layer's index.
TENSOR_NAMES: Final = MappingProxyType(
    {"embed.weight": "token_embd.weight", "final_norm.weight": "output_norm.weight", "head.weight": "output.weight"}
    | {f"{role}.{kind}": f"blk.{{layer}}.{name}.{kind}" for role, name in _LAYER.items() for kind in ("weight", "bias")}
)
# RoPE's divisors, which are part of the config.
ROPE_FACTORS = "rope_freqs.weight"


def find_architecture(model: GgufModel) -> tuple[str, GgufArchitecture]:
    """The `general.architecture` of the file, and its entry. Raises Unsupported."""
    name = model.metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise Unsupported(
            "UNSUPPORTED_ARCHITECTURE",
            f"{model.metadata.path} is of the architecture {name[:80]}, which is not supported in GGUF files. "
            f"Supported: {', '.join(ARCHITECTURES)}.",
            "Serve a model of a supported architecture, or its safetensors folder.",
        )
    return name, ARCHITECTURES[name]

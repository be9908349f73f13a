"""The real shapes that GPU benchmarks use, with random weights, and a tiny shape with which all code can run."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, Attention, Dense, LayerSpec, NormSpec, QkNormSpec, RopeSpec

QWEN3_06B = ArchSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=1024,
    layers=(LayerSpec(Attention(16, 8, 128, rope=RopeSpec(theta=1e6), qk_norm=QkNormSpec()), Dense(3072)),) * 28,
    max_positions=40960,
    norm=NormSpec(1e-6),
    tied_embeddings=True,
)
_LLAMA3_ROPE = RopeSpec(
    kind="llama3",
    theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=8192,
)
LLAMA_8B = ArchSpec(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    layers=(LayerSpec(Attention(32, 8, 128, rope=_LLAMA3_ROPE), Dense(14336)),) * 32,
    max_positions=131072,
    norm=NormSpec(1e-5),
)
SHAPES = {"0.6B": QWEN3_06B, "8B": LLAMA_8B}
TINY = ArchSpec(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=48,
    layers=(LayerSpec(Attention(4, 2, 16), Dense(80)),) * 2,
    max_positions=512,
    norm=NormSpec(1e-5),
)
"""What stands for a real shape where there is no GPU."""
MODELS = {**SHAPES, "tiny": TINY}


def products_of(spec: ArchSpec) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each linear layer of a decode step."""
    attention = spec.attention[0]
    return {
        "qkv": (attention.query_size + 2 * attention.kv_size, spec.hidden_size),
        "o": (spec.hidden_size, attention.query_size),
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "head": (spec.vocab_size, spec.hidden_size),
    }

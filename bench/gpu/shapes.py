"""The real shapes that GPU benchmarks use, with random weights, and a tiny one with which they are gone through."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, RopeSpec

QWEN3_06B = ArchSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=1024,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    max_positions=40960,
    norm_eps=1e-6,
    rope=RopeSpec(theta=1e6),
    qk_norm="head",
    tied_embeddings=True,
)
LLAMA_8B = ArchSpec(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_positions=131072,
    norm_eps=1e-5,
    rope=RopeSpec(
        kind="llama3",
        theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    ),
)
SHAPES = {"0.6B": QWEN3_06B, "8B": LLAMA_8B}
TINY = ArchSpec(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    max_positions=512,
    norm_eps=1e-5,
)
"""What stands for a real shape where there is no GPU."""
MODELS = {**SHAPES, "tiny": TINY}


def products_of(spec: ArchSpec) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each product of a decode step."""
    return {
        "qkv": (spec.query_size + 2 * spec.kv_size, spec.hidden_size),
        "o": (spec.hidden_size, spec.query_size),
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "head": (spec.vocab_size, spec.hidden_size),
    }

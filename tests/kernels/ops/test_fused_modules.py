"""Models of transformers, computed by their own code and with Quire's kernels in place of some modules."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton.gemm import GemmConfigs
from quire_worker.ops.triton.rotate import rotate_heads
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.transformers_backend import fused_modules
from quire_worker.transformers_backend.attention import STEP_ATTENTION, register_attention, use_attention
from quire_worker.transformers_backend.fused_modules import fuse_modules
from quire_worker.transformers_backend.row_check import IsolatedRows
from quire_worker.transformers_backend.split_model import SplitModel

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
CLOSE = 3e-2 if ON_GPU else 1e-4
LAYERS = 2
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
}
ALL = {
    "MergedLinear": 3 * LAYERS,
    "FusedLinear": LAYERS,
    "FusedNorm": 2 * LAYERS + 1,
    "FusedMlp": LAYERS,
    "RotatingAttention": LAYERS,
}
PRODUCTS = {each: ALL[each] for each in ("MergedLinear", "FusedLinear", "FusedMlp")}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Classes of transformers, fields of the config, modules that kernels compute in LAYERS layers.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16}, ALL | {"FusedNorm": 4 * LAYERS + 1}),
    "llama": ("Llama", {"attention_bias": True}, ALL),
    "gemma2": ("Gemma2", {"head_dim": 16}, ALL | {"FusedNorm": 4 * LAYERS + 1}),
    # Its MLP has one projection for gate and up; its rotation covers a part of a head.
    "phi3": (
        "Phi3",
        {"pad_token_id": 0, "eos_token_id": 1, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
        {each: ALL[each] for each in ("FusedNorm", "RotatingAttention")} | {"FusedLinear": 4 * LAYERS},
    ),
    # Neighbouring dimensions are rotated, and layer norms subtract the mean.
    "cohere": ("Cohere", {}, PRODUCTS),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_what_the_modules_did(name: str) -> None:
    model, (_, _, wanted) = tiny_model(name), CASES[name]
    before = hidden(model)
    assert fuse_modules(model, tiny_ops()) == sum(wanted.values())
    assert counted(model) == wanted
    assert (hidden(model) - before).abs().max() <= CLOSE * before.abs().max()


def test_a_module_that_computes_something_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that doubles, and a rotation the other way round, have the names and the parameters of the others."""
    from transformers.models.qwen3 import modeling_qwen3

    norm, rotate = modeling_qwen3.Qwen3RMSNorm.forward, modeling_qwen3.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", lambda self, rows: 2 * norm(self, rows))
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, cos, sin: rotate(q, k, cos, -sin))
    model = tiny_model("qwen3")
    before = hidden(model)
    fuse_modules(model, tiny_ops())
    assert counted(model) == PRODUCTS
    assert (hidden(model) - before).abs().max() <= CLOSE * before.abs().max()


@torch.inference_mode()
def test_a_wide_norm_that_subtracts_the_mean_stays() -> None:
    """The mean of many random numbers around 0 is almost 0, so such numbers would not tell it from an RMS norm."""
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    mean_norm = CohereLayerNorm(4096, 1e-5)  # type: ignore[no-untyped-call]  # transformers has no types here
    norms = mean_norm, LlamaRMSNorm(4096, 1e-5)
    found = [fused_modules.find_fused(norm.to(DEVICE, DTYPE), tiny_ops()) for norm in norms]
    assert [type(each).__name__ for each in found] == ["NoneType", "FusedNorm"]


@pytest.mark.parametrize("results", [0, 1, 3])
def test_a_rotation_with_other_results_stays(results: int) -> None:
    def theirs(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[Any, ...]:
        return (*rotate_heads(query, key, cos, sin), cos)[:results]

    assert not fused_modules.rotates_the_same(theirs, DEVICE, DTYPE)


def test_a_rotation_without_rotated_keys_stays() -> None:
    def theirs(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[Any, ...]:
        return rotate_heads(query, key, cos, sin)[0], None

    assert not fused_modules.rotates_the_same(theirs, DEVICE, DTYPE)


def test_the_comparison_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: kernels that compute something else replace no module."""
    monkeypatch.setattr(TritonOps, "rms_norm", lambda self, x, weight, eps: x * weight)
    monkeypatch.setattr(fused_modules, "rotate_heads", lambda q, k, cos, sin: (q, k))
    fused_modules.rotates_the_same.cache_clear()
    model = tiny_model("llama")
    fuse_modules(model, tiny_ops())
    fused_modules.rotates_the_same.cache_clear()
    assert counted(model) == PRODUCTS


def tiny_model(name: str) -> SplitModel:
    """A model with random weights, in which norms scale."""
    import transformers

    prefix, fields, _ = CASES[name]
    register_attention()
    config = getattr(transformers, f"{prefix}Config")(**SIZES | fields)
    torch.manual_seed(3)
    model = getattr(transformers, f"{prefix}ForCausalLM")._from_config(
        config, attn_implementation=STEP_ATTENTION, dtype=DTYPE
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 1.0)
    return SplitModel(model.to(DEVICE))


def tiny_ops() -> TritonOps:
    return TritonOps(HeadShape(4, 2, 16, 0.25), DEVICE, GemmConfigs({}))


def counted(model: SplitModel) -> dict[str, int]:
    names = Counter(type(module).__name__ for module in model.layers.modules())
    return {name: count for name, count in names.items() if name in ALL}


@torch.inference_mode()
def hidden(model: SplitModel) -> torch.Tensor:
    token, position = (torch.tensor(each, device=DEVICE) for each in ([5, 9, 2, 77], [0, 3, 1, 40]))
    with use_attention(IsolatedRows()):
        return model.hidden(token, position).float()

"""The torch reference against plain formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from quire_worker.arrays import Int32
from quire_worker.model.arch_spec import RopeSpec
from quire_worker.model.rope import inverse_frequencies, rope_tables
from quire_worker.ops.interface import AttentionRules, HeadShape, Ops, QkNormWeights, RopeTables
from quire_worker.ops.torch_plan import TorchPlan
from quire_worker.ops.torch_reference import TorchOps
from quire_worker.ops.weight import DenseWeight

PAGE, HEADS, KV_HEADS, DIM, LAYERS = 16, 6, 2, 8, 3
EPS = 1e-5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(*values: int) -> Int32:
    return np.array(values, np.int32)


@pytest.fixture
def ops() -> TorchOps:
    return TorchOps(HeadShape(HEADS, KV_HEADS, DIM, 0.3), PAGE)


def test_the_reference_fulfils_the_interface(ops: TorchOps) -> None:
    checked: Ops[TorchPlan] = ops
    assert checked.row_multiple == 16


def test_norms_and_residual(ops: TorchOps) -> None:
    x, delta, norm_weight = randn(16, 48), randn(16, 48, seed=1), randn(48, seed=2)
    wanted = functional.rms_norm(x + delta, (48,), norm_weight, EPS)
    residual = x.clone()
    assert torch.allclose(ops.add_rms_norm(delta, residual, norm_weight, EPS), wanted, atol=1e-6)
    assert torch.equal(residual, x + delta)
    assert torch.allclose(ops.rms_norm(x, norm_weight, EPS), functional.rms_norm(x, (48,), norm_weight, EPS), atol=1e-6)


def test_activations(ops: TorchOps) -> None:
    x = randn(16, 160) * 4
    gate, up = x.chunk(2, -1)
    assert torch.allclose(ops.gated_activation(x, "silu"), functional.silu(gate) * up, atol=1e-5)
    wanted = functional.gelu(gate, approximate="tanh")
    assert torch.allclose(ops.gated_activation(x, "gelu_tanh"), wanted * up, atol=1e-5)
    assert torch.allclose(ops.activation(gate, "gelu_tanh"), wanted, atol=1e-5)
    assert torch.allclose(ops.activation(gate, "gelu"), functional.gelu(gate), atol=1e-5)
    assert torch.equal(ops.activation(gate, "relu"), functional.relu(gate))
    assert torch.equal(ops.activation(gate, "relu_squared"), functional.relu(gate).square())
    extreme = torch.tensor([[-1e4, 1e4, 0.0]])
    assert torch.equal(ops.activation(extreme, "silu"), torch.tensor([[0.0, 1e4, 0.0]]))


def test_embedding_and_head(ops: TorchOps) -> None:
    weight = randn(30, 8)
    token = torch.tensor([3, 0, 29])
    assert torch.equal(ops.embedding(token, DenseWeight(weight), 1.0), weight[token])
    assert torch.equal(ops.embedding(token, DenseWeight(weight), 2.0), weight[token] * 2)
    assert torch.equal(weight, randn(30, 8))
    x = randn(16, 8, seed=4)
    logits = x @ weight.T
    assert torch.allclose(ops.lm_head(x, DenseWeight(weight), 0.0), logits, atol=1e-6)
    assert torch.allclose(ops.lm_head(x, DenseWeight(weight), 3.0), 3 * torch.tanh(logits / 3), atol=1e-6)


def test_rope_variants() -> None:
    plain = inverse_frequencies(RopeSpec(theta=100.0), 8)
    assert torch.allclose(plain, torch.tensor([1.0, 100**-0.25, 100**-0.5, 100**-0.75]))
    assert torch.allclose(inverse_frequencies(RopeSpec("linear", 100.0, 4.0), 8), plain / 4)
    scaled = inverse_frequencies(RopeSpec("llama3", 100.0, 8.0, 1.0, 4.0, 32), 8)
    turns = 32 * plain / (2 * math.pi)
    assert scaled[0] == plain[0] and turns[0] > 4
    assert torch.allclose(scaled[turns < 1], plain[turns < 1] / 8)
    middle = (turns > 1) & (turns < 4)
    assert middle.any() and (scaled[middle] < plain[middle]).all() and (scaled[middle] > plain[middle] / 8).all()
    cos, sin = rope_tables(RopeSpec(theta=100.0), 8, 5)
    assert (
        cos.shape == (5, 4) and torch.allclose(cos[3], (3 * plain).cos()) and torch.allclose(sin[3], (3 * plain).sin())
    )


def test_tables_of_no_rotation_have_one_row_and_those_of_many_positions_are_made_piece_by_piece() -> None:
    cos, sin = rope_tables(None, 8, 10**12)
    assert cos.tolist() == [[1.0] * 4] and sin.tolist() == [[0.0] * 4]
    rope = RopeSpec(theta=100.0)
    angles = torch.outer(torch.arange(70_000, dtype=torch.float32), inverse_frequencies(rope, 8))
    cos, sin = rope_tables(rope, 8, 70_000)
    assert torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin())


def test_heads_that_do_not_rotate_are_written_as_they_are(ops: TorchOps) -> None:
    shape, rope = HeadShape(HEADS, KV_HEADS, DIM, 0.3), RopeTables(*rope_tables(None, DIM, 10**12))
    pages = torch.zeros(12, KV_HEADS, LAYERS, 2, PAGE, DIM)
    table = np.arange(1, 11, dtype=np.int32)[None]
    qkv = randn(20, (HEADS + 2 * KV_HEADS) * DIM, seed=30)
    plan = ops.plan(pages, 20, ints(100), ints(20), table)
    query = ops.qk_norm_rope_write(qkv.clone(), pages, 1, plan, shape, rope, None)
    assert torch.equal(query, qkv[:, : HEADS * DIM])
    keys = pages.transpose(1, 4)[1:11, :, 1, 0].reshape(10 * PAGE, KV_HEADS * DIM)[100:120]
    assert torch.equal(keys, qkv[:, HEADS * DIM : (HEADS + KV_HEADS) * DIM])


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, first: int, scale: float, cap: float, rules: AttentionRules
) -> Tensor:
    """[tokens, heads, D] queries from position `first`, over [positions, KV heads, D]."""
    repeat = HEADS // KV_HEADS
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeat, 1)) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    q, k = torch.arange(first, first + len(query))[:, None], torch.arange(len(key))[None, :]
    hidden = (k > q) | (k <= q - (rules.window or 10**6)) | (k < q // (rules.chunk or 10**6) * (rules.chunk or 10**6))
    if rules.slopes is not None:
        scores = scores + rules.slopes[:, None, None] * (k - q)
    scores = scores.masked_fill(hidden, -torch.inf)
    if rules.sinks is not None:
        scores = torch.cat((scores, rules.sinks[:, None, None].expand(-1, len(query), 1)), -1)
    weights = scores.softmax(-1)[:, :, : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(repeat, 1))


SLOPES, SINKS = torch.linspace(0.01, 1.0, HEADS), torch.linspace(-5.0, 5.0, HEADS)
RULES = {
    "all": AttentionRules(),
    "narrow": AttentionRules(5),
    "wide": AttentionRules(70),
    "chunks": AttentionRules(chunk=24),
    "alibi": AttentionRules(slopes=SLOPES),
    "sinks": AttentionRules(70, sinks=SINKS),
    "chunks, alibi, sinks": AttentionRules(chunk=100, slopes=SLOPES, sinks=SINKS),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("layer", [0, 2])
def test_rope_write_and_attention(ops: TorchOps, name: str, cap: float, layer: int) -> None:
    """A decode, a first chunk and a later chunk in one step, against a dense computation."""
    rules = RULES[name]
    shape = HeadShape(HEADS, KV_HEADS, DIM, 0.3, cap)
    rope = RopeTables(*rope_tables(RopeSpec(theta=50.0), DIM, 300))
    norm = QkNormWeights(randn(DIM, seed=7) + 1, randn(DIM, seed=8) + 1, EPS)
    pages = torch.zeros(60, KV_HEADS, LAYERS, 2, PAGE, DIM)
    position, count = ints(150, 0, 90), ints(1, 20, 37)
    table = np.zeros((3, 12), np.int32)
    for row in range(3):
        table[row, :10] = np.random.default_rng(row).permutation(10) + 1 + 12 * row
    past = [randn(int(length), 2, KV_HEADS, DIM, seed=20 + row) for row, length in enumerate(position)]
    for row, tensors in enumerate(past):
        for at, both in enumerate(tensors):
            pages[table[row, at // PAGE], :, layer, :, at % PAGE] = both.transpose(0, 1)
    rows = 64
    qkv = randn(rows, (HEADS + 2 * KV_HEADS) * DIM, seed=30)
    before = pages.clone()
    plan = ops.plan(pages, rows, position, count, table)
    query = ops.qk_norm_rope_write(qkv.clone(), pages, layer, plan, shape, rope, norm)
    found = ops.paged_attention(query, pages, layer, plan, shape, rules).clone()
    assert not found[58:].any()
    begin = 0
    for row in range(3):
        first, tokens = int(position[row]), int(count[row])
        parts = qkv[begin : begin + tokens].view(tokens, -1, DIM)
        cos, sin = (each[first : first + tokens, None] for each in (rope.cos, rope.sin))

        def turned(x: Tensor, norm_weight: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            a, b = functional.rms_norm(x, (DIM,), norm_weight, EPS).chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        q = turned(parts[:, :HEADS], norm.query)
        key = torch.cat((past[row][:, 0], turned(parts[:, HEADS : HEADS + KV_HEADS], norm.key)))
        value = torch.cat((past[row][:, 1], parts[:, HEADS + KV_HEADS :]))
        wanted = dense_attention(q, key, value, first, 0.3, cap, rules)
        assert torch.allclose(found[begin : begin + tokens].view(tokens, HEADS, DIM), wanted, atol=1e-5), row
        for at in range(first, first + tokens):
            stored = pages[table[row, at // PAGE], :, layer, :, at % PAGE]
            assert torch.allclose(stored, torch.stack((key[at], value[at]), 1), atol=1e-6)
            before[table[row, at // PAGE], :, layer, :, at % PAGE] = stored
        begin += tokens
    assert torch.equal(pages, before), "something else was written"

"""Triton's ops against the torch reference, on random inputs, with NaN in every page and output that is not theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_worker.arrays import Int32
from quire_worker.model.arch_spec import Activation, RopeSpec
from quire_worker.model.rope import rope_tables
from quire_worker.ops.interface import AttentionRules, HeadNorm, HeadShape, QkNormWeights, RopeTables
from quire_worker.ops.torch_reference import TorchOps
from quire_worker.ops.triton import attention, attention_plan, triton_ops
from quire_worker.ops.triton.fresh_attention import Fresh, padded_length
from quire_worker.ops.triton.gemm import GatedActivation, GemmConfig, GemmConfigs, Gemv, Tall, gemm
from quire_worker.ops.triton.kv_splits import BEGIN, PARTS, WIDE
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.ops.weight import DenseWeight
from tests.tiers import deep_after

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]
EPS = 1e-5
LAYERS = 2
# The interpreter computes with numpy, which tells of the overflow that 1 / (1 + exp(1e4)) is meant to have.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(*values: int) -> Int32:
    return np.array(values, np.int32)


def close(got: Tensor, wanted: Tensor) -> bool:
    """Relative error over the whole, as float32 or bf16 arithmetic leaves it; NaN is never close."""
    bound = 1e-5 if got.dtype == torch.float32 and not ON_GPU else 1e-2
    got = got.float().cpu()
    return bool((got - wanted).norm() <= bound * wanted.norm())


def make(shape: HeadShape) -> TritonOps:
    return TritonOps(shape, DEVICE, GemmConfigs({}))


PLAIN = HeadShape(4, 2, 32, 0.3)
ROPE = RopeSpec()


@pytest.mark.parametrize("dtype", TYPES)
def test_norms(dtype: torch.dtype) -> None:
    ops, reference = make(PLAIN), TorchOps(PLAIN, 16)
    x, delta, norm_weight = (randn(5, 96, seed=s).to(dtype) for s in range(3))
    norm_weight = norm_weight[0]
    wanted = reference.rms_norm(x.float(), norm_weight.float(), EPS)
    assert close(ops.rms_norm(x.to(DEVICE), norm_weight.to(DEVICE), EPS), wanted)
    residual, kept = x.float().clone(), x.to(DEVICE).clone()
    wanted = reference.add_rms_norm(delta.float(), residual, norm_weight.float(), EPS)
    assert close(ops.add_rms_norm(delta.to(DEVICE), kept, norm_weight.to(DEVICE), EPS), wanted)
    assert close(kept, residual)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_many_rows_are_added_to_the_residual(
    biased: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_ops, "_MANY_ROWS", 4)
    ops = make(PLAIN)
    bias = randn(40, seed=3).to(dtype) if biased else None
    weight = DenseWeight(randn(40, 96, seed=1).to(dtype).to(DEVICE), None if bias is None else bias.to(DEVICE))
    for rows in (3, 4, 9):
        x, residual = randn(rows, 96, seed=rows).to(dtype), randn(rows, 40, seed=2).to(dtype)
        product = x.float() @ weight.data.cpu().float().T + (0.0 if bias is None else bias.float())
        onto = residual.to(DEVICE).clone()
        left = ops.add_linear(x.to(DEVICE), weight, onto)
        if rows < 4:
            assert left is not None and close(left, product) and torch.equal(onto.cpu(), residual)
        else:
            assert left is None and close(onto, residual.float() + product)
    even = TritonOps(PLAIN, DEVICE, GemmConfigs({}, batch_invariant=True))
    assert even.add_linear(x.to(DEVICE), weight, onto) is not None, "a row's bits depend on itself alone"


@pytest.mark.parametrize("dtype", TYPES)
def test_activations_gates_and_embedding(dtype: torch.dtype) -> None:
    ops, reference = make(PLAIN), TorchOps(PLAIN, 16)
    x = (randn(3, 2 * 1100) * 4).to(dtype)
    for name in get_args(Activation):
        assert close(ops.gated_activation(x.to(DEVICE), name), reference.gated_activation(x.float(), name))
        assert close(ops.activation(x.to(DEVICE), name), reference.activation(x.float(), name))
    gate = (randn(3, 2 * 1100, seed=1) * 4).to(dtype)
    got, wanted = x.to(DEVICE).clone(), x.float().clone()
    ops.sigmoid_gate(got, gate.to(DEVICE))
    reference.sigmoid_gate(wanted, gate.float())
    assert close(got, wanted)
    alone = x[1:2].to(DEVICE).clone()
    ops.sigmoid_gate(alone, gate[1:2].to(DEVICE))
    assert torch.equal(alone[0], got[1]), "a row's bits depend on itself alone"
    extreme = torch.tensor([[-1e4, 1e4, 0.0]], device=DEVICE)
    assert torch.equal(ops.activation(extreme, "silu").cpu(), torch.tensor([[0.0, 1e4, 0.0]]))
    assert torch.equal(ops.activation(extreme, "gelu_tanh").cpu(), torch.tensor([[0.0, 1e4, 0.0]]))
    table = randn(30, 96).to(dtype)
    token = torch.tensor([3, 0, 29])
    assert close(ops.embedding(token.to(DEVICE), DenseWeight(table.to(DEVICE)), 2.0), table.float()[token] * 2)


@pytest.mark.parametrize("dtype", TYPES)
def test_layer_norms_norms_of_heads_and_additions(dtype: torch.dtype) -> None:
    ops, reference = make(PLAIN), TorchOps(PLAIN, 16)
    x, delta = (randn(5, 256, seed=seed).to(dtype) for seed in (1, 2))
    weight, bias = (randn(256, seed=seed).to(dtype) for seed in (3, 4))
    wanted = reference.layer_norm(x.float(), weight.float(), bias.float(), EPS)
    assert close(ops.layer_norm(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), EPS), wanted)
    for centred, groups, given in ((True, 2, bias[:64]), (False, 2, bias[:64]), (False, 1, None)):
        norm = HeadNorm(64, groups, 128 // groups, EPS, centred, weight[: 128 // groups], given)
        here = replace(norm, weight=norm.weight.float(), bias=None if given is None else given.float())
        there = replace(norm, weight=norm.weight.to(DEVICE), bias=None if given is None else given.to(DEVICE))
        expected, got = x.float().clone(), x.to(DEVICE).clone()
        reference.head_norm(expected, here)
        ops.head_norm(got, there)
        assert close(got, expected) and torch.equal(got[:, :64].cpu(), x[:, :64])
    case = Case(PLAIN, 16, ints(3, 0), ints(1, 4), dtype)
    plan = ops.plan(case.poisoned, case.rows, case.position, case.count, case.table)
    table, total = randn(9, 256, seed=5).to(dtype), x.to(DEVICE).clone()
    ops.add_positions(total, table.to(DEVICE), plan)
    assert close(total, x.float() + table.float()[[3, 0, 1, 2, 3]])
    ops.add(delta.to(DEVICE), total)
    assert close(total, x.float() + table.float()[[3, 0, 1, 2, 3]] + delta.float())


class Case:
    """Sequences with pages in random order; every page that a sequence does not own holds NaN."""

    def __init__(
        self,
        shape: HeadShape,
        page: int,
        position: Int32,
        count: Int32,
        dtype: torch.dtype,
        rope: RopeSpec | None = ROPE,
    ) -> None:
        rng = np.random.default_rng(1)
        need = -(-(position + count) // page)
        total = int(need.sum()) + 4
        order = rng.permutation(np.arange(1, total)).astype(np.int32)
        width = int(need.max()) + 1
        self.table = np.zeros((len(position), width), np.int32)
        at = 0
        for row, n in enumerate(need.tolist()):
            self.table[row, :n] = order[at : at + n]
            at += n
        self.position, self.count, self.shape = position, count, shape
        self.rows = int(count.sum())
        clean = randn(total, shape.kv_heads, LAYERS, 2, page, shape.head_dim, seed=5).to(dtype).float()
        self.clean = clean
        poisoned = clean.clone()
        poisoned[0] = float("nan")
        poisoned[order[at:]] = float("nan")
        for row, n in enumerate(need.tolist()):
            past = int(position[row] + count[row] - (n - 1) * page)
            poisoned[int(self.table[row, n - 1]), :, :, :, past:] = float("nan")
        self.poisoned = poisoned.to(dtype).to(DEVICE)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = randn(self.rows, width, seed=6).to(dtype)
        tables = rope_tables(rope, shape.head_dim, 512)
        self.rope = RopeTables(*tables)
        self.rope_device = RopeTables(*(t.to(DEVICE) for t in tables))
        norm_weights = [randn(shape.head_dim, seed=s).to(dtype) for s in (7, 8)]
        self.norm = QkNormWeights(norm_weights[0].float(), norm_weights[1].float(), EPS)
        self.norm_device = QkNormWeights(norm_weights[0].to(DEVICE), norm_weights[1].to(DEVICE), EPS)


SHAPES = [HeadShape(4, 2, 32, 0.3), HeadShape(3, 1, 16, 0.2, 5.0), HeadShape(4, 4, 64, 0.125)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", deep_after(4 if ON_GPU else 1, [HeadShape(4, 2, 24, 0.3), *SHAPES]))
@pytest.mark.parametrize("normed", ["before", "after", ""])
@pytest.mark.parametrize(("many", "rope"), [(1, ROPE), (1000, ROPE), (1000, None)])
def test_rope_and_page_write(
    shape: HeadShape,
    normed: str,
    many: int,
    rope: RopeSpec | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_ops, "_MANY_ROWS", many)
    case = Case(shape, 16, ints(3, 40, 0), ints(1, 5, 17), dtype, rope)
    ops, reference = make(shape), TorchOps(shape, 16)
    norm, norm_device = (replace(each, after_rope=normed == "after") for each in (case.norm, case.norm_device))
    args = (case.position, case.count, case.table)
    padded = case.rows + 3
    wanted_pages, got_pages = case.clean.clone(), case.clean.to(dtype).to(DEVICE)
    qkv = torch.cat([case.qkv, torch.full((3, case.qkv.shape[1]), 7.0).to(dtype)])
    plan = reference.plan(wanted_pages, padded, *args)
    wanted = reference.qk_norm_rope_write(
        qkv.float().clone(), wanted_pages, 1, plan, shape, case.rope, norm if normed else None
    )
    device_plan = ops.plan(got_pages, padded, *args)
    got = ops.qk_norm_rope_write(
        qkv.to(DEVICE), got_pages, 1, device_plan, shape, case.rope_device, norm_device if normed else None
    )
    assert close(got[: case.rows], wanted[: case.rows])
    assert close(got_pages[1:], wanted_pages[1:])
    assert torch.equal(got_pages[0].cpu(), case.clean[0].to(dtype)), "padding rows are written nowhere"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("programs", "many"), deep_after(1, [(1, 1), (12, 1), (12, 100)]))
def test_attention(
    shape: HeadShape, window: int, programs: int, many: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LAST_MERGES_FROM", many)
    monkeypatch.setattr(attention_plan, "resident_programs", lambda _: programs * shape.kv_heads)
    case = Case(shape, 16, ints(0, 15, 16, 270, 0, 33), ints(1, 1, 1, 1, 40, 21), dtype)
    ops, reference = make(shape), TorchOps(shape, 16)
    query = randn(case.rows, shape.heads * shape.head_dim, seed=9).to(dtype)
    plan = reference.plan(case.clean, case.rows, case.position, case.count, case.table)
    wanted = reference.paged_attention(query.float(), case.clean, 1, plan, shape, AttentionRules(window))
    device_plan = ops.plan(case.poisoned, case.rows, case.position, case.count, case.table)
    for _ in range(2):  # the counters of those who arrived are as they were
        got = ops.paged_attention(query.to(DEVICE), case.poisoned, 1, device_plan, shape, AttentionRules(window))
        assert close(got, wanted)
    assert device_plan.splits is not None and (int(device_plan.splits[5].max()) > 2) == (programs > 1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("window", [0, 100])
def test_attention_of_few_sequences_whose_keys_have_many_heads(page: int, window: int, dtype: torch.dtype) -> None:
    """Their shares are made for wide tiles, which the kernel has where pages are large enough."""
    shape = HeadShape(8, 2, 32, 0.2)
    case = Case(shape, page, ints(270, 71), ints(1, 1), dtype)
    ops, reference = make(shape), TorchOps(shape, page)
    query = randn(case.rows, shape.heads * shape.head_dim, seed=9).to(dtype)
    plan = reference.plan(case.clean, case.rows, case.position, case.count, case.table)
    wanted = reference.paged_attention(query.float(), case.clean, 1, plan, shape, AttentionRules(window))
    device_plan = ops.plan(case.poisoned, case.rows, case.position, case.count, case.table)
    assert close(
        ops.paged_attention(query.to(DEVICE), case.poisoned, 1, device_plan, shape, AttentionRules(window)), wanted
    )
    assert device_plan.splits is not None
    assert (device_plan.splits[BEGIN] % WIDE == 0).all() and int(device_plan.splits[PARTS].max()) > 1


@pytest.mark.deep
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", deep_after(1, [HeadShape(4, 2, 32, 0.3), HeadShape(8, 8, 64, 0.125)]))
def test_a_fresh_prompt_needs_no_pages(shape: HeadShape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are read where rope left them, beside another chunk's tiles and a row that decodes. What padding rows
    hold spreads to nobody: they lie behind the prompt."""
    monkeypatch.setattr(triton_ops, "_MANY_ROWS", 16)
    case = Case(shape, 16, ints(20, 0, 33), ints(1, 40, 21), dtype)
    ops, reference = make(shape), TorchOps(shape, 16)
    fresh = Fresh(1, 40)
    rows = 1 + padded_length(40)
    padding = torch.ones(rows - case.rows, case.qkv.shape[1]).to(dtype)
    qkv, poisoned_qkv = torch.cat([case.qkv, padding]), torch.cat([case.qkv, padding * torch.nan])
    args = (case.position, case.count, case.table)
    wanted_pages, got_pages = case.clean.clone(), case.poisoned
    plan = reference.plan(wanted_pages, rows, *args)
    query = reference.qk_norm_rope_write(qkv.float().clone(), wanted_pages, 1, plan, shape, case.rope, case.norm)
    wanted = reference.paged_attention(query, wanted_pages, 1, plan, shape, AttentionRules())
    device_plan = ops.plan(got_pages, rows, *args)
    assert device_plan.tile_sequence is not None
    device_plan.tile_sequence[device_plan.tile_sequence == 1] = -1
    device_plan.fresh = (fresh,)
    query = ops.qk_norm_rope_write(
        poisoned_qkv.to(DEVICE), got_pages, 1, device_plan, shape, case.rope_device, case.norm_device
    )
    got = ops.paged_attention(query, got_pages, 1, device_plan, shape, AttentionRules())
    assert close(got[: case.rows], wanted[: case.rows])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, Gemv(8, 32, 4)),
        (2, Gemv(16, 64, 4)),
        (5, Tall(16, 64, 32, 4, 3)),
        (17, Tall(32, 64, 64, 4, 3)),
        (7, Tall(16, 16, 16, 4, 3, shares=4)),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_products(rows: int, config: GemmConfig, biased: bool, dtype: torch.dtype) -> None:
    weight = DenseWeight(randn(100, 192).to(dtype), randn(100, seed=3).to(dtype) if biased else None)
    x = randn(rows, 192, seed=2).to(dtype)
    there = DenseWeight(weight.data.to(DEVICE), None if weight.bias is None else weight.bias.to(DEVICE))
    wanted = x.float() @ weight.data.float().T
    if weight.bias is not None:
        wanted += weight.bias.float()
    assert close(gemm(x.to(DEVICE), there, config, pdl=False), wanted)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    ("rows", "config"),
    [(3, Gemv(8, 32, 4)), (4, Gemv(8, 32, 4)), (17, Tall(16, 64, 32, 4, 3)), (65, Tall(64, 64, 32, 4, 3))],
)
def test_too_many_rows_for_a_config_are_an_error(
    rows: int, config: GemmConfig, activation: GatedActivation | None
) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows are too many for"):
        gemm(randn(rows, 64).to(DEVICE), DenseWeight(randn(100, 64).to(DEVICE)), config, False, activation=activation)


@pytest.mark.parametrize("config", [Gemv(8, 32, 4), Tall(16, 64, 32, 4, 3)])
def test_gates_with_a_bias_are_an_error(config: GemmConfig) -> None:
    weight = DenseWeight(randn(100, 64).to(DEVICE), randn(100, seed=3).to(DEVICE))
    with pytest.raises(ValueError, match="adds no bias"):
        gemm(randn(1, 64).to(DEVICE), weight, config, False, activation="silu")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_an_even_product_has_the_same_bits_alone(biased: bool, dtype: torch.dtype) -> None:
    products = GemmConfigs({}, batch_invariant=True)
    weight = DenseWeight(
        randn(100, 96).to(dtype).to(DEVICE), randn(100, seed=3).to(dtype).to(DEVICE) if biased else None
    )
    x = randn(70, 96, seed=2).to(dtype).to(DEVICE)
    together = products.gemm(x, weight, pdl=False)
    wanted = x.float() @ weight.data.float().T
    if weight.bias is not None:
        wanted += weight.bias.float()
    assert close(together, wanted.cpu())
    for row in (0, 3, 69):
        assert torch.equal(products.gemm(x[row : row + 1].contiguous(), weight, pdl=False)[0], together[row])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_logits_lie_where_they_are_kept(softcap: float) -> None:
    ops, weight = make(PLAIN), DenseWeight(randn(50, 96).to(DEVICE))
    x = randn(5, 96, seed=2).to(DEVICE)
    wanted = ops.lm_head(x, weight, softcap)
    ops.kept_logits = torch.full((4, 50), float("nan"), device=DEVICE)
    kept = ops.lm_head(x[:4].contiguous(), weight, softcap)
    assert kept.data_ptr() == ops.kept_logits.data_ptr() and close(kept, wanted[:4].cpu())
    assert ops.lm_head(x, weight, softcap).data_ptr() != ops.kept_logits.data_ptr(), "more rows than there is room for"


def test_a_shape_takes_the_way_of_the_next_larger_row_count() -> None:
    config = Gemv(8, 32, 4)
    tall = Tall(16, 64, 32, 4, 3)
    products = GemmConfigs({(1, 100, 192): config, (16, 100, 192): tall})
    assert products.config_for(1, 100, 192) is config and products.config_for(5, 100, 192) is tall
    assert products.config_for(17, 100, 192) is None and products.config_for(1, 100, 64) is None

"""The compiled row kernels agree with the torch reference, and a row has the same bits in every batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_common.errors import ConfigError
from quire_worker.arrays import Float32
from quire_worker.config import WorkerConfig
from quire_worker.model.arch_spec import Activation, RopeSpec
from quire_worker.model.rope import rope_tables
from quire_worker.ops.backends import BACKENDS, SUPPORTED, backend_on, make_ops
from quire_worker.ops.cpu import job_runner
from quire_worker.ops.cpu.cpu_ops import CpuOps
from quire_worker.ops.cpu.plan import CpuPlan
from quire_worker.ops.cpu.simd import LANES, exp, kernel, load, reduce_max, reduce_sum, store
from quire_worker.ops.interface import HeadNorm, HeadShape, Ops, QkNormWeights, RopeTables
from quire_worker.ops.torch_reference import TorchOps

SHAPE = HeadShape(heads=6, kv_heads=2, head_dim=32, score_scale=0.3)
PAGE, EPS = 16, 1e-5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuOps]:
    monkeypatch.setattr(job_runner, "_MIN_THREAD_COST_NS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield CpuOps(SHAPE, PAGE)
    torch.set_num_threads(before)


@pytest.fixture
def reference() -> TorchOps:
    return TorchOps(SHAPE, PAGE)


@pytest.mark.parametrize("size", [48, 256, 20])
def test_rms_norms_match_torch_reference(ops: CpuOps, reference: TorchOps, size: int) -> None:
    x, delta, norm_weight = randn(33, size) * 3, randn(33, size, seed=1), randn(size, seed=2)
    assert torch.allclose(ops.rms_norm(x, norm_weight, EPS), reference.rms_norm(x, norm_weight, EPS), atol=1e-5)
    residuals = x.clone(), x.clone()
    found = ops.add_rms_norm(delta, residuals[0], norm_weight, EPS).clone()
    assert torch.allclose(found, reference.add_rms_norm(delta, residuals[1], norm_weight, EPS), atol=1e-5)
    assert torch.equal(residuals[0], residuals[1])
    for row in (0, 15, 32):
        assert torch.equal(
            ops.add_rms_norm(delta[row : row + 1], x[row : row + 1].clone(), norm_weight, EPS)[0], found[row]
        )


@pytest.mark.parametrize("size", [48, 256, 20])
def test_layer_norms_and_additions_match_torch_reference(ops: CpuOps, reference: TorchOps, size: int) -> None:
    x, weight, bias = randn(33, size) * 3 + 1, randn(size, seed=1), randn(size, seed=2)
    for given in (bias, None):
        found = ops.layer_norm(x, weight, given, EPS).clone()
        assert torch.allclose(found, reference.layer_norm(x, weight, given, EPS), atol=1e-5)
        assert torch.allclose(found, torch.nn.functional.layer_norm(x, (size,), weight, given, EPS), atol=1e-5)
        assert torch.equal(ops.layer_norm(x[7:8].clone(), weight, given, EPS)[0], found[7])
    total = x.clone()
    ops.add(found, total)
    assert torch.equal(total, x + found)
    position, count = np.array([5, 0], np.int32), np.array([1, 3], np.int32)
    plan = ops.plan(torch.zeros(4, 2, 1, 2, PAGE, 32), 4, position, count, np.ones((2, 1), np.int32))
    table, rows = randn(9, size, seed=4), x[:4].clone()
    ops.add_positions(rows, table, plan)
    assert torch.equal(rows, x[:4] + table[[5, 0, 1, 2]])


@pytest.mark.parametrize(("groups", "size", "shared"), [(6, 32, True), (6, 32, False), (1, 192, True)])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_norms_of_heads_match_torch(
    ops: CpuOps, groups: int, size: int, shared: bool, centred: bool, biased: bool
) -> None:
    x, width = randn(9, 320) * 2 + 1, size if shared else groups * size
    weight, bias = randn(width, seed=1), randn(width, seed=2) if biased else None
    parts = x[:, 64:256].view(9, groups, size)
    parts = parts - parts.mean(-1, keepdim=True) if centred else parts
    normed = parts / (parts.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.view(-1, size)
    normed = normed if bias is None else normed + bias.view(-1, size)
    wanted = torch.cat([x[:, :64], normed.reshape(9, 192), x[:, 256:]], dim=1)
    for each in (ops, TorchOps(SHAPE, PAGE)):
        found = x.clone()
        each.head_norm(found, HeadNorm(64, groups, size, EPS, centred, weight, bias))
        assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("size", [48, 704, 20])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gated_activation_matches_torch_reference(ops: CpuOps, reference: TorchOps, size: int, activation: str) -> None:
    x = randn(33, 2 * size) * 4
    x[0, :4] = torch.tensor([-1e4, 1e4, 0.0, -80.0])
    found = ops.gated_activation(x, activation).clone()  # type: ignore[arg-type]  # one of the literals
    wanted = reference.gated_activation(x, activation)  # type: ignore[arg-type]  # as above
    assert torch.allclose(found, wanted, atol=1e-5, rtol=1e-5)
    for row in (0, 17, 32):
        assert torch.equal(ops.gated_activation(x[row : row + 1].clone(), activation)[0], found[row])  # type: ignore[arg-type]  # as above
    if activation.startswith("relu"):
        return
    x[5, 3] = float("nan")
    assert ops.gated_activation(x, activation)[5].isnan().sum() == 1  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize("size", [48, 704, 20])
def test_output_gates_match_torch(ops: CpuOps, reference: TorchOps, size: int) -> None:
    x, gate = randn(33, size), randn(33, size, seed=1) * 4
    gate[0, :4] = torch.tensor([-1e4, 1e4, 0.0, -80.0])
    wanted = x * torch.sigmoid(gate)
    for each in (ops, reference):
        found = x.clone()
        each.sigmoid_gate(found, gate.clone())
        assert torch.allclose(found, wanted, atol=1e-6, rtol=1e-5)
        for row in (0, 17, 32):
            alone = x[row : row + 1].clone()
            each.sigmoid_gate(alone, gate[row : row + 1].clone())
            assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("head_dim", [16, 32, 48, 128])
@pytest.mark.parametrize("normed", ["", "before", "after"])
@pytest.mark.parametrize("rotates", [True, False])
def test_rope_and_page_write_match_torch_reference(rotates: bool, normed: str, head_dim: int) -> None:
    shape = dataclasses.replace(SHAPE, head_dim=head_dim)
    rope = RopeTables(*rope_tables(RopeSpec(theta=50.0) if rotates else None, head_dim, 300))
    norm = None
    if normed:
        weights = randn(head_dim, seed=7) + 1, randn(head_dim, seed=8) + 1
        norm = QkNormWeights(*weights, EPS, after_rope=normed == "after")
    position, count = np.array([150, 0, 90], np.int32), np.array([1, 20, 37], np.int32)
    table = (np.random.default_rng(0).permutation(30) + 1).reshape(3, 10).astype(np.int32)
    qkv = randn(64, 10 * head_dim, seed=3)
    found = []
    for ops in (CpuOps(shape, PAGE), TorchOps(shape, PAGE)):
        pages = torch.zeros(31, 2, 3, 2, PAGE, head_dim)
        plan = ops.plan(pages, 64, position, count, table)
        query = ops.qk_norm_rope_write(qkv.clone(), pages, 2, plan, shape, rope, norm)  # type: ignore[arg-type]  # a plan of its own
        found.append((query[:58].clone(), pages))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)
    assert torch.equal(found[0][1] != 0, found[1][1] != 0), "something else was written"
    assert found[0][1].any()


@kernel
def _run_intrinsics(x: Float32, y: Float32, sums: Float32) -> None:
    for at in range(0, x.size, LANES):
        store(y, at, exp(load(x, at)))
        sums[2 * at // LANES] = reduce_sum(load(x, at))
        sums[2 * at // LANES + 1] = reduce_max(load(x, at))


def run_intrinsics(x: Float32) -> tuple[Float32, Float32]:
    y, sums = np.empty_like(x), np.empty(2 * x.size // LANES, np.float32)
    _run_intrinsics(x, y, sums)
    return y, sums


def test_exp_and_reductions_are_accurate() -> None:
    x = np.linspace(-86.9, 88, 1 << 16, dtype=np.float32)
    y, sums = run_intrinsics(x)
    wanted = np.exp(x.astype(np.float64))
    assert (np.abs(y - wanted) <= 2 * np.spacing(wanted.astype(np.float32))).all()
    by_vector = x.reshape(-1, LANES)
    assert np.allclose(sums[0::2], by_vector.sum(1), rtol=1e-5, atol=1e-3)
    assert np.array_equal(sums[1::2], by_vector.max(1))


def test_exp_saturates_and_keeps_nan() -> None:
    x = np.full(LANES, 0.0, np.float32)
    x[:6] = 0.0, -np.inf, np.inf, np.nan, -87.1, 1e9
    y, _ = run_intrinsics(x)
    assert y[0] == 1 and y[1] == 0 and y[4] == 0
    assert np.isnan(y[3]) and y[2] == y[5] > 1e38


def test_attention_backends_are_chosen_by_name() -> None:
    assert isinstance(make_ops("cpu", SHAPE, PAGE), CpuOps)
    assert isinstance(make_ops("torch", SHAPE, PAGE), TorchOps)
    assert isinstance(make_ops("cpu", dataclasses.replace(SHAPE, head_dim=12), PAGE), TorchOps)
    with pytest.raises(ConfigError, match="no attention backend 'flash'") as error:
        make_ops("flash", SHAPE, PAGE)
    assert error.value.code == "UNKNOWN_ATTENTION_BACKEND" and "cpu, torch" in error.value.fix
    (field,) = (f for f in dataclasses.fields(WorkerConfig) if f.name == "attention_backend")
    assert set(field.metadata["choices"]) == {"auto", *SUPPORTED["cpu"], *SUPPORTED["cuda"]} and field.default == "auto"
    assert (backend_on("cpu", "auto"), backend_on("cuda", "auto"), set(BACKENDS)) == ("cpu", "cudnn", {"cpu", "torch"})
    with pytest.raises(ConfigError, match="no attention backend 'cpu' on cuda") as error:
        backend_on("cuda", "cpu")
    assert error.value.fix == "Choose one of auto, cudnn, triton."


def test_cpu_ops_implement_the_ops_protocol() -> None:
    checked: Ops[CpuPlan] = CpuOps(SHAPE, PAGE)
    assert checked.row_multiple == 1

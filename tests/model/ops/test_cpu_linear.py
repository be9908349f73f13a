"""Linear layers on the CPU agree with float64 for every kind of weight, and a row has the same bits in every batch."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator

import llvmlite.binding
import numpy as np
import pytest
import torch
from torch import Tensor

from quire_common.gguf.block_kinds import KIND_NAMED
from quire_worker.ops.cpu.cpu_ops import CpuOps
from quire_worker.ops.cpu.simd import HAS_AVX512
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.weight import DenseWeight, StoredRows, StoredWeight, TiledWeight, Weight
from quire_worker.weights.gguf.dequantize import READABLE_KINDS
from tests.tiers import deep_after

SHAPE = HeadShape(4, 2, 32, 32**-0.5)
INPUTS = 512

# Those of the files that people serve.
COMMON_KINDS = ("Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16")
KINDS = (*COMMON_KINDS, *(kind for kind in READABLE_KINDS if kind not in COMMON_KINDS))


@pytest.fixture(scope="module", params=[1, 3])
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield CpuOps(SHAPE, 16)
    torch.set_num_threads(before)


def random_rows(kind_name: str, rows: int, seed: int = 0, inputs: int = INPUTS) -> StoredRows:
    """Return rows of random blocks whose values are finite and of similar magnitude."""
    kind, drawn = KIND_NAMED[kind_name], np.random.default_rng(seed)
    if kind.values == 1:
        values = torch.from_numpy(drawn.standard_normal((rows, inputs), dtype=np.float32))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind_name]
        return StoredRows(kind, values.to(dtype).view(torch.uint8))
    data = drawn.integers(0, 256, (rows, inputs // kind.values, kind.num_bytes), dtype=np.uint8)
    scale = drawn.uniform(0.01, 0.02, (2, rows, inputs // kind.values)).astype(np.float16).view(np.uint8)
    scale = scale.reshape(2, rows, inputs // kind.values, 2)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind_name, (0, 2))
    if kind_name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"):
        places = places[:1]
    for number, at in enumerate(places):
        data[:, :, at : at + 2] = scale[number]
    return StoredRows(kind, torch.from_numpy(data.reshape(rows, -1)))


def values_of(weight: Weight) -> Tensor:
    if isinstance(weight, StoredWeight):
        return torch.cat([part.values() for part in weight.parts]).double()
    assert isinstance(weight, DenseWeight)
    return weight.data.double()


def check(ops: CpuOps, weight: Weight, prepared: Weight) -> None:
    """Check that values are right within float32's rounding, rows are batch invariant, and look-ups are exact."""
    values = values_of(weight)
    x = torch.randn(33, values.shape[1], generator=torch.Generator().manual_seed(5))
    whole = ops.linear(x, prepared).clone()
    wanted = x.double() @ values.T
    size = x.abs().double() @ values.abs().T + 1e-30
    assert ((whole - wanted).abs() / size).max() < 1e-6
    for rows in range(1, 33):
        first = (7 * rows) % (33 - rows)
        assert torch.equal(ops.linear(x[first : first + rows].clone(), prepared), whole[first : first + rows]), rows
    token = torch.tensor([0, values.shape[0] - 1, 17, 17])
    assert torch.equal(ops.embedding(token, prepared, 1.0).double(), values[token])


@pytest.mark.parametrize("kind", deep_after(len(COMMON_KINDS), KINDS))
def test_gguf_weights_match_their_float64_values(ops: CpuOps, kind: str) -> None:
    weight = StoredWeight((random_rows(kind, 48),))
    prepared = ops.prepare(weight, embeds=True)
    check(ops, weight, prepared)
    # At most 1.5 bytes for each quantised weight: 8-bit integers, with float32 scale and offset for each 16.
    most = {"F32": 4.0, "F16": 2.0, "BF16": 2.0}.get(kind, 1.5)
    assert prepared.num_bytes <= most * 48 * INPUTS + 4 * 48


@pytest.mark.parametrize(("outputs", "inputs"), [(37, 64), (16, 40), (1, 31), (100, 33)])
def test_partial_tiles_match_float64_values(ops: CpuOps, outputs: int, inputs: int) -> None:
    drawn = torch.Generator().manual_seed(outputs)
    bias = torch.randn(outputs, generator=drawn)
    weight = DenseWeight(torch.randn(outputs, inputs, generator=drawn), bias)
    values, prepared = weight.data.double(), ops.prepare(weight)
    x = torch.randn(19, inputs, generator=drawn)
    whole = ops.linear(x, prepared).clone()
    assert whole.shape == (19, outputs) and whole.is_contiguous()
    assert torch.allclose(whole.double(), x.double() @ values.T + bias, atol=1e-4)
    assert torch.equal(ops.linear(x[3:4].clone(), prepared), whole[3:4])


def test_linear_mixes_quantisation_kinds(ops: CpuOps) -> None:
    """Files of mixed quantisation have such query, key and value weights."""
    bias = torch.randn(96, generator=torch.Generator().manual_seed(2))
    parts = random_rows("Q4_K", 48), random_rows("Q4_K", 16, 1), random_rows("Q6_K", 32, 2)
    weight = StoredWeight(parts, bias)
    prepared = ops.prepare(weight)
    assert isinstance(prepared, TiledWeight) and [each.num_tiles for each in prepared.segments] == [4, 2]
    x = torch.randn(9, INPUTS, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(ops.linear(x, prepared).double(), x.double() @ values_of(weight).T + bias, atol=1e-3)
    uneven = StoredWeight((random_rows("Q4_K", 24), random_rows("Q6_K", 24)))
    wanted = x.double() @ values_of(uneven).T
    assert torch.allclose(ops.linear(x, ops.prepare(uneven)).double(), wanted, atol=1e-3)


def test_blocked_gemm_is_bit_identical_to_one_row(ops: CpuOps) -> None:
    """The rows exceed one panel, and the inputs fill several panels."""
    prepared = ops.prepare(StoredWeight((random_rows("Q4_1", 80, inputs=1536),)))
    x = torch.randn(300, 1536, generator=torch.Generator().manual_seed(4))
    whole = ops.linear(x, prepared).clone()
    for row in (0, 127, 128, 200, 255, 256, 299):
        assert torch.equal(ops.linear(x[row : row + 1].clone(), prepared)[0], whole[row]), row


def digest() -> str:
    """Return a digest of the results of linear layers in several storage formats, for 1 to 33 rows."""
    ops, hashed = CpuOps(SHAPE, 16), hashlib.sha256()
    x = torch.randn(33, INPUTS, generator=torch.Generator().manual_seed(6))
    for kind in ("Q4_1", "Q6_K", "BF16", "F32"):
        prepared = ops.prepare(StoredWeight((random_rows(kind, 48),)))
        for rows in range(1, 34):
            hashed.update(ops.linear(x[:rows].clone(), prepared).numpy().tobytes())
    return f"{hashed.hexdigest()} {HAS_AVX512}"


@pytest.mark.deep
@pytest.mark.skipif(not HAS_AVX512, reason="this processor has no AVX-512 to compare with")
def test_avx2_and_avx512_compute_the_same_bits() -> None:
    features = llvmlite.binding.get_host_cpu_features()
    wide = ("avx512", "avx10", "amx", "evex512")
    narrow = ",".join(("+" if on and not name.startswith(wide) else "-") + name for name, on in features.items())
    environment = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": narrow}
    command = [sys.executable, "-c", "from tests.model.ops.test_cpu_linear import digest; print(digest())"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [digest().split()[0], "False"]


def test_unprepared_weight_is_refused(ops: CpuOps) -> None:
    with pytest.raises(TypeError, match="not prepared"):
        ops.linear(torch.zeros(1, 4), DenseWeight(torch.zeros(4, 4)))

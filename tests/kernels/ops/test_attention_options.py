"""Attention's options against a plain reading of each: windows, soft caps, sinks, and pages in eight bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_worker.cuda.cuda_model import CudaModel
from quire_worker.cuda.load import page_kind
from quire_worker.model.arch_spec import RopeSpec
from quire_worker.model.rope import rope_tables
from quire_worker.ops.backends import backend_on
from quire_worker.ops.interface import AttentionRules, HeadShape, RopeTables
from quire_worker.ops.torch_reference import TorchOps
from quire_worker.ops.triton import attention, attention_plan
from tests.kernels.ops.test_triton_ops import DEVICE, ON_GPU, TYPES, Case, close, ints, make, randn
from tests.tiers import deep_after

# The interpreter computes with numpy, which tells of the overflow that a sigmoid is meant to have.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
ROWS = torch.zeros(1, dtype=torch.bfloat16)
SHAPES = [HeadShape(6, 2, 32, 0.3), HeadShape(3, 1, 16, 0.2, 5.0)]
ODD = HeadShape(4, 2, 24, 0.3)


def plainly(case: Case, query: Tensor, pages: Tensor, rules: AttentionRules) -> Tensor:
    """Layer 1, row by row and head by head, in float64."""
    shape, page = case.shape, pages.shape[4]
    group = shape.heads // shape.kv_heads
    out = torch.zeros(query.shape, dtype=torch.float64)
    row = 0
    for sequence, count in enumerate(case.count.tolist()):
        for at in range(int(case.position[sequence]), int(case.position[sequence]) + count):
            first = at // rules.chunk * rules.chunk if rules.chunk else max(0, at - (rules.window or at + 1) + 1)
            seen = range(first, at + 1)
            cells = [(int(case.table[sequence, p // page]), p % page) for p in seen]
            for head in range(shape.heads):
                part = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
                keys, values = (
                    torch.stack([pages[which, head // group, 1, kind, place] for which, place in cells]).double()
                    for kind in (0, 1)
                )
                score = keys @ query[row, part].double() * shape.score_scale
                if shape.softcap:
                    score = shape.softcap * torch.tanh(score / shape.softcap)
                if rules.slopes is not None:
                    score = score + rules.slopes[head].double() * (torch.tensor(seen) - at)
                if rules.sinks is not None:
                    score = torch.cat([score, rules.sinks[head : head + 1].double()])
                    values = torch.cat([values, torch.zeros(1, shape.head_dim)])
                out[row, part] = torch.softmax(score, dim=0) @ values
            row += 1
    return out.float()


@pytest.mark.parametrize("dtype", deep_after(1, TYPES))
@pytest.mark.parametrize("shape", deep_after(1, SHAPES))
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_options(
    shape: HeadShape,
    window: int,
    sunk: bool,
    eight_bits: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(shape, 16, ints(0, 15, 90, 0, 33), ints(1, 1, 1, 43, 5), torch.float8_e4m3fn if eight_bits else dtype)
    query = randn(case.rows, shape.heads * shape.head_dim, seed=9).to(dtype)
    # One sink outweighs all keys, one counts for nothing.
    sinks = torch.tensor([0.5, 40.0, -60.0, 1.0, 2.0, 3.0][: shape.heads]) if sunk else None
    wanted = plainly(case, query.float(), case.clean, AttentionRules(window, sinks=sinks))
    for programs, heads_together in ((1, 0), (12, 2048)):
        monkeypatch.setattr(attention_plan, "resident_programs", lambda _, count=programs * shape.kv_heads: count)
        monkeypatch.setattr(attention, "_HEADS_TOGETHER", heads_together)
        ops = make(shape)
        plan = ops.plan(case.poisoned, case.rows, case.position, case.count, case.table)
        got = ops.paged_attention(
            query.to(DEVICE),
            case.poisoned,
            1,
            plan,
            shape,
            AttentionRules(window, sinks=None if sinks is None else sinks.to(DEVICE)),
        )
        assert close(got, wanted)
        assert plan.splits is not None and (int(plan.splits[5].max()) > 1) == (programs > 1)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", deep_after(1, TYPES))
@pytest.mark.parametrize("shape", [SHAPES[0], ODD])
@pytest.mark.parametrize(("chunk", "sloped"), [(24, False), (0, True), (24, True)])
def test_chunks_and_alibi_and_heads_that_are_no_power_of_two(
    shape: HeadShape, chunk: int, sloped: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(shape, 16, ints(0, 15, 90, 0, 33), ints(1, 1, 1, 43, 5), dtype)
    query = randn(case.rows, shape.heads * shape.head_dim, seed=9).to(dtype)
    slopes = torch.tensor([0.5, 0.25, 0.1, 1.0, 0.01, 2.0][: shape.heads]) if sloped else None
    wanted = plainly(case, query.float(), case.clean, AttentionRules(chunk=chunk, slopes=slopes))
    monkeypatch.setattr(attention_plan, "resident_programs", lambda _: 12 * shape.kv_heads)
    plan = make(shape).plan(case.poisoned, case.rows, case.position, case.count, case.table)
    rules = AttentionRules(chunk=chunk, slopes=None if slopes is None else slopes.to(DEVICE))
    assert close(make(shape).paged_attention(query.to(DEVICE), case.poisoned, 1, plan, shape, rules), wanted)


@pytest.mark.parametrize("dtype", TYPES)
def test_pages_in_eight_bits_are_written_rounded_and_never_overflow(dtype: torch.dtype) -> None:
    shape = HeadShape(4, 2, 32, 0.3)
    case = Case(shape, 16, ints(3, 0), ints(1, 17), dtype)
    qkv = case.qkv.clone()
    qkv[0] *= 1e4
    tables = rope_tables(RopeSpec(), shape.head_dim, 512)
    pages = torch.zeros(case.clean.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    exact = torch.zeros(case.clean.shape)
    ops, reference = make(shape), TorchOps(shape, 16)
    plan = ops.plan(pages, case.rows, case.position, case.count, case.table)
    there = RopeTables(*(each.to(DEVICE) for each in tables))
    ops.qk_norm_rope_write(qkv.to(DEVICE), pages, 1, plan, shape, there, None)
    plain = reference.plan(exact, case.rows, case.position, case.count, case.table)
    reference.qk_norm_rope_write(qkv.float(), exact, 1, plain, shape, RopeTables(*tables), None)
    got, wanted = pages.float().cpu(), exact.clamp(-448.0, 448.0)
    assert bool(got.isfinite().all())
    # A mantissa of three bits, and bf16 before it on a GPU; the least positive number is 2^-9.
    near = (got - wanted).abs() <= wanted.abs() / 14 + 2**-9
    if not ON_GPU:
        # The interpreter loses the carry of a mantissa that is rounded up to the next power of two.
        rounded = wanted.to(torch.float8_e4m3fn).float().abs()
        near |= (torch.frexp(rounded).mantissa == 0.5) & (rounded > wanted.abs())
    assert bool(near.all())


def test_long_prompts_are_left_to_cudnn_where_nothing_speaks_against_it() -> None:
    def leaves(
        attention: str, *, window: int = 0, even: bool = False, softcap: float = 0.0, pages: Tensor = ROWS
    ) -> bool:
        shape, spec = HeadShape(4, 2, 64, 1.0, softcap), SimpleNamespace(sees_all=not window)
        ops = SimpleNamespace(batch_invariant=even)
        decoder: Any = SimpleNamespace(head_shape=shape, spec=spec, ops=ops, can_be_cut=True)
        return CudaModel(decoder, pages, attention).leaves_prompts

    assert leaves(backend_on("cuda", "auto")) and leaves("cudnn")
    assert not leaves("triton")
    assert not leaves("cudnn", window=8) and not leaves("cudnn", even=True) and not leaves("cudnn", softcap=5.0)
    assert not leaves("cudnn", pages=ROWS.to(torch.float8_e4m3fn))


def test_backends_share_pages_where_no_bits_are_promised_and_kernels_where_they_are() -> None:
    """See page_kind: the namespace parts what promises bits, and there cuDNN is never asked."""
    assert page_kind(batch_invariant=True) != page_kind(batch_invariant=False)
    decoder: Any = SimpleNamespace(
        head_shape=HeadShape(4, 2, 64, 1.0),
        spec=SimpleNamespace(sees_all=True),
        ops=SimpleNamespace(batch_invariant=True),
    )
    assert not any(CudaModel(decoder, ROWS, backend).leaves_prompts for backend in ("cudnn", "triton"))

"""The compiled attention agrees with the torch reference, and a row has the same bits in every batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire_worker.ops.cpu import job_runner
from quire_worker.ops.cpu.cpu_ops import CpuOps
from quire_worker.ops.interface import AttentionRules, HeadShape
from quire_worker.ops.torch_reference import TorchOps

LAYERS, LAYER, PAGES_EACH = 2, 1, 30
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """One layer of a model and its pages. Sequence s has the PAGES_EACH pages from 1 + s * PAGES_EACH on, shuffled."""

    head_dim: int = 32
    group: int = 2
    kv_heads: int = 2
    page_size: int = 16
    softcap: float = 0.0
    window: int = 0
    chunk: int = 0
    sloped: bool = False
    sunk: bool = False

    @property
    def rules(self) -> AttentionRules:
        slopes, sinks = torch.linspace(0.01, 1.0, self.shape.heads), torch.linspace(-9.0, 9.0, self.shape.heads)
        return AttentionRules(self.window, self.chunk, slopes if self.sloped else None, sinks if self.sunk else None)

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.group * self.kv_heads, self.kv_heads, self.head_dim, 0.3, self.softcap)

    def table(self, sequences: int) -> np.ndarray:
        rows = [np.random.default_rng(s).permutation(PAGES_EACH) + 1 + s * PAGES_EACH for s in range(sequences)]
        return np.stack(rows).astype(np.int32)

    def pages(self, sequences: int) -> Tensor:
        shape = (1 + sequences * PAGES_EACH, self.kv_heads, LAYERS, 2, self.page_size, self.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def query(self, sequence: int, position: int, count: int) -> Tensor:
        """Return query rows of a sequence, which are the same in every step."""
        size = self.shape.heads * self.head_dim
        rows = torch.randn(PAGES_EACH * self.page_size, size, generator=torch.Generator().manual_seed(sequence))
        return rows[position : position + count] * 2

    def run(
        self, ops: CpuOps | TorchOps, pages: Tensor, parts: list[tuple[int, int, int]], sequences: int, padding: int = 3
    ) -> list[Tensor]:
        """Return the attention of (sequence, position, count) parts in one step."""
        members, position, count = (np.array(each, np.int32) for each in zip(*parts, strict=True))
        rows = int(count.sum())
        query = torch.zeros(rows + padding, self.shape.heads * self.head_dim)
        query[:rows] = torch.cat([self.query(*part) for part in parts])
        plan = ops.plan(pages, rows + padding, position, count, self.table(sequences)[members])
        out = ops.paged_attention(query, pages, LAYER, plan, self.shape, self.rules)  # type: ignore[arg-type]  # a plan of its own
        assert not out[rows:].any()
        return [part.clone() for part in torch.split(out[:rows], count.tolist())]


def cpu(case: Case) -> CpuOps:
    return CpuOps(case.shape, case.page_size)


CASES = [
    Case(),
    Case(head_dim=16, group=1, page_size=1),
    Case(head_dim=48, group=3, page_size=5),
    Case(head_dim=64, group=4, window=1),
    Case(head_dim=80, group=7, kv_heads=1, window=5),
    Case(head_dim=128, group=3, page_size=32, window=70, softcap=2.0),
    Case(head_dim=32, group=100, kv_heads=1, softcap=20.0),
    Case(head_dim=32, group=1, page_size=128, window=64),
    Case(head_dim=96, group=3, chunk=40),
    Case(head_dim=192, group=2, sloped=True, sunk=True),
    Case(head_dim=256, group=3, kv_heads=1, chunk=64, sloped=True),
    Case(head_dim=16, group=5, page_size=8, window=30, sunk=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_matches_torch_reference(case: Case) -> None:
    longest = min(PAGES_EACH * case.page_size, 300)
    parts = [(0, longest - 1, 1), (1, 0, min(40, longest)), (2, 3, 1), (3, 9, longest - 9), (4, 0, 1), (5, 16, 14)]
    pages = case.pages(6)
    reference = TorchOps(case.shape, case.page_size)
    found, wanted = (torch.cat(case.run(ops, pages, parts, 6)) for ops in (cpu(case), reference))
    # A score of a larger head is a longer sum, whose rounding depends on the processor.
    assert (found - wanted).abs().max() < 1e-5 * max(1.0, case.head_dim / 128)
    assert wanted.abs().max() > 1


cases = st.builds(
    Case,
    head_dim=st.sampled_from((16, 32, 48)),
    group=st.integers(1, 5),
    page_size=st.sampled_from((7, 8, 16, 64)),
    softcap=st.sampled_from((0.0, 3.0)),
    window=st.sampled_from((0, 0, 1, 17, 64, 100)),
    sloped=st.booleans(),
    sunk=st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(case=cases, lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4), cut=st.lists(st.integers(1, 90)))
def test_attention_rows_are_batch_invariant(case: Case, lengths: list[int], cut: list[int]) -> None:
    """Each row is computed alone, and in chunks of any size beside other sequences."""
    sequences = len(lengths)
    pages, ops = case.pages(sequences), cpu(case)
    done = [0] * sequences
    found: list[list[Tensor]] = [[] for _ in lengths]
    turn = 0
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        size = cut[turn % len(cut)] if cut else 200
        parts = [(s, done[s], min(size, length - done[s])) for s, length in enumerate(lengths) if done[s] < length]
        for (s, _, count), rows in zip(parts, case.run(ops, pages, parts, sequences), strict=True):
            found[s].append(rows)
            done[s] += count
        turn += 1
    for s, length in enumerate(lengths):
        rows = torch.cat(found[s])
        for position in {0, length // 2, length - 1}:
            (alone,) = case.run(ops, pages, [(s, position, 1)], sequences, padding=0)
            assert torch.equal(alone[0], rows[position])


@settings(max_examples=15, deadline=None)
@given(case=cases, position=st.integers(0, 150), count=st.integers(1, 40))
def test_masked_keys_do_not_change_results(case: Case, position: int, count: int) -> None:
    """NaN instead of zeros in the dummy page, in other layers, behind the end and before the window changes no bit."""
    table = case.table(1)[0]
    first = max(0, position - case.window + 1) if case.window else 0
    seen = np.arange(first, position + count)
    found = []
    for spare in (0.0, NAN):
        pages = torch.full_like(case.pages(1), spare)
        page, slot = table[seen // case.page_size], seen % case.page_size
        pages[page, :, LAYER, :, slot] = case.pages(1)[page, :, LAYER, :, slot]
        found.append(case.run(cpu(case), pages, [(0, position, count)], 1)[0])
    assert torch.equal(found[0], found[1])
    assert not found[0].isnan().any()


@pytest.mark.parametrize("damage", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", [0, 1])
def test_nan_and_inf_reach_only_rows_that_see_them(damage: float, kind: int) -> None:
    case = Case(window=50)
    pages = case.pages(2)
    parts = [(0, 0, 150), (1, 0, 20)]
    sound = case.run(cpu(case), pages, parts, 2)
    table = case.table(2)[0]
    pages[table[70 // 16], 1, LAYER, kind, 70 % 16, 9] = damage
    spoilt, other = case.run(cpu(case), pages, parts, 2)
    assert torch.equal(other, sound[1])
    seeing = torch.zeros(150, dtype=torch.bool)
    seeing[70:120] = True
    assert torch.equal(spoilt[~seeing], sound[0][~seeing])
    hurt = ~spoilt[seeing].isfinite()
    if kind == 1:
        assert hurt.view(50, 4, 32)[:, 2:, 9].all() and hurt.sum() == 100
    elif damage != damage:
        assert hurt.view(50, 4, 32)[:, 2:].all() and not hurt.view(50, 4, 32)[:, :2].any()
    else:
        # An infinite key gives a score of inf or -inf. With inf a whole head is not finite; -inf has no effect.
        assert torch.equal(hurt.view(50, 4, 32).any(-1), hurt.view(50, 4, 32).all(-1)) and hurt.any()


def test_attention_is_bit_identical_for_any_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "_MIN_THREAD_COST_NS", 1)
    parts = [(0, 0, 200), (1, 180, 1), (2, 90, 37), (3, 0, 1)]
    before = torch.get_num_threads()
    for case in (Case(), Case(group=3, window=20)):
        pages, found = case.pages(4), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                ops = cpu(case)
                found.append(torch.cat(case.run(ops, pages, parts, 4)))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        assert found[0].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    case = Case()
    pages = case.pages(1) * 300
    ops, reference = cpu(case), TorchOps(case.shape, case.page_size)
    found, wanted = (case.run(each, pages, [(0, 0, 130)], 1)[0] for each in (ops, reference))
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-2)

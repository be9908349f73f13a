"""The kernel table of `make gpu-check STAGE=5`: every kernel of a step has a row, beside its floor."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

from bench.gpu.kernel_table import roofline
from bench.gpu.kernel_table.decoder_kernels import DecoderKernels
from bench.gpu.kernel_table.kernel_case import CALLS, COLD_BYTES, KernelCase, copies_of
from bench.gpu.record import Recorder
from bench.gpu.shapes import TINY
from quire_worker.ops.triton import kernels
from quire_worker.ops.triton.gemm import GemmConfigs, Tall
from quire_worker.profile import kernel_parts
from quire_worker.profile.cost import Cost
from quire_worker.profile.floor import Peak
from tests.kernels.uninterpreted import run_uninterpreted

ROWS = {
    "embedding", "norm", "add and norm", "qkv 128 x 48", "o 48 x 64", "gate_up 160 x 48", "down 48 x 80",
    "head 97 x 48", "rope and page write", "decode attention 2 x 40", "silu", "feed tokens", "sampling, greedy",
    "sampling, temperature", "sampling, top_k 50, top_p 0.95", "sampling, top_p 0.95", "sampling, min_p 0.05",
    "sampling, typical_p 0.95",
    "sampling, controls", "logprobs, 5 alternatives", "gated product 160 x 48, 40 rows",
    "prefill attention 2 x 40, tiles",
}  # fmt: skip  # a list of names


@pytest.mark.parametrize("gpu", [False, True])
def test_every_kernel_of_a_step_has_a_row(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a CPU, also beside a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = {case.name: case for _, case in roofline.cases(roofline.bench_of(TINY, on_gpu=False), small=True)}
    assert set(found) - ROWS == {"prefill attention 2 x 40, torch"} and found.keys() >= ROWS
    assert all(case.cost.bytes > 0 for case in found.values())
    drawn = [case.cost for name, case in found.items() if name.startswith("sampling, ") and "controls" not in name]
    assert drawn == [Cost(1, 2 * 97 * 4)] * 6, "however a token is drawn, its logits are read once"
    assert found["gated product 160 x 48, 40 rows"].cost == Cost(1, 4 * (160 * 48 + 40 * (48 + 80)), 2 * 40 * 48 * 160)
    tiled, by_torch = (found[f"prefill attention 2 x 40, {config}"] for config in ("tiles", "torch"))
    assert tiled.cost == by_torch.cost and tiled.cost.flops == 2 * 4 * 4 * 16 * 40 * 41 // 2


def test_gates_have_a_row_for_the_kernels_that_compute_them() -> None:
    """A table with a config for two rows: one kernel computes gates and activation of up to two sequences."""
    bench = roofline.bench_of(TINY, on_gpu=False)
    bench.ops.gemm_configs = GemmConfigs({(2, 160, 48): Tall(16, 16, 16, 4, 3)})
    decoder = DecoderKernels(bench)
    apart = {"gate_up 160 x 48", "silu"}
    for batch, own in ((1, {"gated product 160 x 48, 1 rows"}), (2, {"gated product 160 x 48, 2 rows"}), (3, apart)):
        names = {case.name for case in decoder.cases(batch, 40)}
        assert {name for name in names if "gate" in name or name == "silu"} == own


def test_cold_copies_exceed_the_cache() -> None:
    assert copies_of(1) == CALLS and copies_of(1 << 40) == 2
    assert copies_of(100 << 20) * (100 << 20) >= COLD_BYTES


@pytest.mark.parametrize(("wanted", "results"), [(0.0, ["measured"]), (0.9, ["measured", "FAILED"])])
def test_a_case_stands_beside_its_floor(wanted: float, results: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelCase, "_time_us", lambda self: 10.0)
    case = KernelCase("a kernel", lambda index: torch.zeros(1), Cost(1, 8_000, 4_000_000), wanted=wanted)
    recorder = Recorder(5, "a machine")
    roofline.report(recorder, "0.6B", iter([("batch 1", case)]), Peak(1e9, 1e12))
    assert [line["result"] for line in recorder.lines] == results
    line = recorder.lines[0]
    assert line["check"] == "0.6B batch 1, a kernel" and (line["floor_us"], line["of_floor"]) == (8.0, 0.8)
    assert line["gb_per_s"] == 0.8 and not line.keys() & {"tflop_per_s", "nodes_us"}, "memory bounds it, not its node"


def test_a_case_that_cannot_be_timed_leaves_the_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_us(case: KernelCase) -> float:
        if case.name == "broken":
            raise RuntimeError("operation not permitted when stream is capturing")
        return 10.0

    monkeypatch.setattr(KernelCase, "_time_us", time_us)
    cases = [KernelCase(name, lambda index: torch.zeros(1), Cost(1, 8, 0)) for name in ("broken", "sound")]
    recorder = Recorder(5, "a machine")
    roofline.report(recorder, "0.6B", iter([("batch 1", case) for case in cases]), None)
    assert recorder.failed == ["0.6B batch 1, broken"]
    assert [line["check"] for line in recorder.lines] == ["0.6B batch 1, broken", "0.6B batch 1, sound"]


def test_what_is_small_is_bound_by_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelCase, "_time_us", lambda self: 10.0)
    case = KernelCase("a kernel", lambda index: torch.zeros(1), Cost(1, 1_000, 2_000_000), launches=2)
    found = case.figures(Peak(1e9, 1e12))
    assert found == {"us": 10.0, "tflop_per_s": 0.2, "floor_us": 2.0, "of_floor": 0.2, "nodes_us": 2.26}
    assert case.figures(None) == {"us": 10.0}


def test_kernels_that_make_no_numbers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU a chain of it would be a graph of nothing.
    monkeypatch.setattr(KernelCase, "_time_us", lambda self: 10.0)
    case = KernelCase("a kernel", lambda index: torch.full((2,), torch.nan), Cost(1, 8, 0))
    recorder = Recorder(5, "a machine")
    roofline.report(recorder, "0.6B", iter([("batch 1", case)]), None)
    assert recorder.failed == ["0.6B batch 1, a kernel gives numbers"]


def test_a_profile_looks_for_kernels_by_their_names() -> None:
    """A kernel that is renamed would go to another part of the table."""
    there = set[str]()
    for each in pkgutil.iter_modules(kernels.__path__):
        there |= vars(importlib.import_module(f"{kernels.__name__}.{each.name}")).keys()
    assert {*kernel_parts.ATTENTION_KERNELS, *kernel_parts.KERNELS_BEHIND} <= there


@pytest.mark.slow
def test_the_whole_table_can_be_launched() -> None:
    told = run_uninterpreted("-m", "tests.kernels.gpu_check.bound", timeout_s=300)
    rows = [line.split(" ", 2) for line in told.splitlines()]
    # 20 at each batch, less one where one kernel computes gates and activation (batch 1 and 32); decode attention of 32
    # x 8192, and four of prompts.
    assert len(rows) == len({name for _, _, name in rows}) == 2 * (3 * 20 - 2 + 1 + 4)
    # Fills, of which two are behind thresholds, are torch's.
    wrong = [row for row in rows if not 1 <= int(row[0]) <= int(row[1]) <= int(row[0]) + 2]
    assert not wrong, wrong

"""Profiles: times out of traces, floors by arithmetic, and a whole profile of a tiny model on the CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.__main__ import main as quire_main
from quire_common.errors import ConfigError
from quire_common.gguf.block_kinds import KIND_NAMED
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.torch_reference import TorchOps
from quire_worker.ops.weight import DenseWeight, StoredRows, StoredWeight
from quire_worker.profile.cost import Attended, Cost, attention_cost, controls_cost, gated_product_cost, product_cost
from quire_worker.profile.floor import Peak, floor_us
from quire_worker.profile.kernel_parts import by_part, costs_behind
from quire_worker.profile.kernel_table import as_text, make_rows
from quire_worker.profile.profile_config import ProfileConfig
from quire_worker.profile.profiled_batch import attended, profiled_batch
from quire_worker.profile.step_profile import profile_step
from quire_worker.profile.trace_times import OUTSIDE, times_by_range
from quire_worker.profile.traced_ops import TracedOps
from tests.model.folders import write_config


def span(cat: str, name: str, ts: float, dur: float, correlation: int = 0, tid: int = 1) -> dict[str, Any]:
    args = {"correlation": correlation} if correlation else {}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def test_kernels_belong_to_the_range_that_launched_them() -> None:
    events = [
        span("user_annotation", "quire: head", 0, 100),
        span("user_annotation", "quire: product", 10, 20),
        span("user_annotation", "another's", 12, 10),
        span("cuda_driver", "cuLaunchKernelEx", 15, 2, 7),
        span("cuda_runtime", "cudaLaunchKernel", 50, 2, 8),
        span("cuda_runtime", "cudaLaunchKernel", 55, 2, 9),
        span("cuda_runtime", "cudaLaunchKernel", 300, 2, 10),
        span("kernel", "gemm", 400, 30, 7, tid=9),
        span("kernel", "tanh", 440, 4, 8, tid=9),
        span("kernel", "tanh", 450, 6, 9, tid=9),
        span("gpu_memcpy", "Memcpy", 460, 1, 10, tid=9),
        {"ph": "M", "name": "process_name"},
    ]
    times = times_by_range({"traceEvents": events}, "quire: ")
    assert {name: (each.us, each.count) for name, each in times.items()} == {
        "product": (30, 1),
        "head": (10, 2),
        OUTSIDE: (1, 1),
    }
    assert times["head"].kernels["tanh"].count == 2


def test_without_kernels_a_range_counts_its_own_time() -> None:
    events = [
        span("user_annotation", "quire: head", 0, 100),
        span("user_annotation", "quire: product", 10, 20),
        span("user_annotation", "quire: product", 40, 30),
        span("user_annotation", "quire: product", 200, 5, tid=2),
    ]
    times = times_by_range({"traceEvents": events}, "quire: ")
    assert times["head"].us == 50 and (times["product"].us, times["product"].count) == (55, 3)


def test_costs_are_what_a_call_cannot_do_without() -> None:
    shape = HeadShape(4, 2, 32, 0.3)
    ops = TracedOps(TorchOps(shape, 16), (Attended.of(9, 1), Attended(0, 0, 0)))
    weight = DenseWeight(torch.randn(48, 32))
    x = torch.randn(16, 32)
    wanted = torch.nn.functional.linear(x, weight.data)
    for _ in range(2):
        assert torch.allclose(ops.linear(x, weight), wanted, atol=1e-5)
    one = 4 * (48 * 32 + 16 * 32 + 16 * 48)
    gated = 4 * (48 * 32 + 16 * 32 + 16 * 24)
    assert ops.gated_linear(x, weight, "silu").shape == (16, 24)
    assert ops.costs == {
        "product 48 x 32": Cost(2, 2 * one, 2 * 2 * 16 * 32 * 48),
        "gated product 48 x 32": Cost(1, gated, 2 * 16 * 32 * 48),
    }
    peak = Peak(1e9, 1e12)
    assert floor_us(Cost(1, 1000, 500_000), peak) == pytest.approx(1.0), "memory is the bound"
    assert floor_us(Cost(1, 1000, 5_000_000), peak) == pytest.approx(5.0), "arithmetic is the bound"


def test_attention_of_a_prompt_counts_half_of_its_square() -> None:
    shape = HeadShape(16, 8, 128, 0.3)
    prompt = attention_cost(Attended.of(0, 1024).times(4), shape, 2, 2)
    assert prompt.flops == 4 * (4 * 16 * 128) * 1024 * 1025 // 2, "2 D for a score, 2 D for a value, the triangle alone"
    assert prompt.bytes == 4 * 1024 * (2 * 8 * 128 + 2 * 16 * 128) * 2
    chunk = attention_cost(Attended.of(1000, 24), shape, 2, 1)
    assert chunk.flops == 4 * 16 * 128 * sum(range(1001, 1025)), "what is before a chunk is seen by all of its rows"
    assert chunk.bytes == 1024 * 2 * 8 * 128 + 24 * 2 * 16 * 128 * 2, "fp8 pages, bf16 rows"
    decode = attention_cost(Attended.of(1023, 1).times(32), shape, 2, 2)
    assert decode.bytes == 32 * (1024 * 2 * 8 * 128 + 2 * 16 * 128) * 2 and decode.flops == 32 * 4 * 16 * 128 * 1024


def int8_blocks(outputs: int, inputs: int) -> StoredRows:
    kind = KIND_NAMED["Q8_0"]
    return StoredRows(kind, torch.zeros(outputs, inputs // kind.values * kind.num_bytes, dtype=torch.uint8))


def test_a_weight_costs_what_is_stored_of_it() -> None:
    """Whatever is computed with, and scales and biases too."""
    data, bias = torch.zeros(4096, 1024, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    flops, rows = 2 * 32 * 1024 * 4096, 32 * (1024 + 4096)
    assert product_cost(32, DenseWeight(data), 2) == Cost(1, 2 * 4096 * 1024 + 2 * rows, flops)
    assert product_cost(32, DenseWeight(data), 4) == Cost(1, 2 * 4096 * 1024 + 4 * rows, flops)
    small = StoredWeight((int8_blocks(4096, 1024),), bias)
    assert product_cost(32, small, 2) == Cost(1, 4096 * 32 * 34 + 2 * 4096 + 2 * rows, flops)


def test_a_gated_product_writes_half_of_its_outputs() -> None:
    weight = torch.zeros(2 * 3072, 1024, dtype=torch.bfloat16)
    moved = 2 * (6144 * 1024 + 8192 * (1024 + 3072))
    assert gated_product_cost(8192, DenseWeight(weight), 2) == Cost(1, moved, 2 * 8192 * 1024 * 6144)
    small = StoredWeight((int8_blocks(6144, 1024),))
    assert gated_product_cost(32, small, 2) == Cost(1, 6144 * 32 * 34 + 2 * 32 * 4096, 2 * 32 * 1024 * 6144)


def test_kernels_that_no_call_tells_apart_are_parts_of_their_own() -> None:
    launches = [
        ("attention", "decode_attention_kernel"), ("attention", "merge_splits_kernel"),
        ("attention", "prefill_attention_kernel"), ("attention", "cudnn_generated_fort_native_sdpa"),
        ("", "feed_kernel"), ("", "top_k_top_p_kernel"), ("", "sample_kernel"), ("", "finish_kernel"),
        ("", "control_kernel"), ("", "block_logprobs_kernel"), ("", "merge_logprobs_kernel"), ("", "fill"),
        ("head", "gemm"), ("", "place_kernel"), ("", "fetch_masks_kernel"),
    ]  # fmt: skip  # pairs
    events = []
    for number, (name, kernel) in enumerate(launches, 1):
        at = 10.0 * number
        events += [span("user_annotation", f"quire: {name}", at, 8)] if name else []
        events += [span("cuda_driver", "cuLaunchKernelEx", at + 1, 2, number)]
        events += [span("kernel", kernel, 1000 + at, number, number, tid=9)]
    parts = by_part(times_by_range({"traceEvents": events}, "quire: "))
    assert {name: each.us for name, each in parts.items()} == {
        "decode attention": 1 + 2, "prefill attention": 3 + 4, "feed tokens": 5 + 14, "sampling: thresholds": 6,
        "sampling: draw": 7 + 8, "sampling: controls": 9, "logprobs": 10 + 11, OUTSIDE: 12, "head": 13,
        "sampling: masks": 15,
    }  # fmt: skip  # one table
    assert list(parts["prefill attention"].kernels) == ["prefill_attention_kernel", "cudnn_generated_fort_native_sdpa"]


def test_what_reads_logits_has_a_floor_where_rows_ask_for_it() -> None:
    greedy = profiled_batch(3, 33, 0, 97, 16, 20)
    assert costs_behind(greedy, 97, 2) == {"sampling: draw": Cost(1, 3 * 97 * 2)}
    asked = Sampling(temperature=0.8, top_p=0.9, logprobs=5, controls=LogitControls(frequency_penalty=0.5))
    costs = costs_behind(profiled_batch(3, 33, 0, 97, 16, 20, asked), 97, 2)
    assert costs["sampling: thresholds"] == costs["logprobs"] == Cost(1, 3 * 97 * 2)
    assert costs["sampling: controls"] == controls_cost(3, 97, 2) == Cost(1, 3 * 97 * (2 + 4))


def test_a_table_compares_with_the_floor() -> None:
    events = [span("user_annotation", "quire: product", 0, 40)]
    times = times_by_range({"traceEvents": events}, "quire: ")
    (row,) = make_rows(times, {"product": Cost(2, 10_000, 0)}, 2, Peak(1e9, 1e12))
    assert (row.us, row.floor_us, row.of_floor, row.calls, row.share) == (20, 10, 0.5, 2, 1)
    assert row.gb_per_s == pytest.approx(0.5) and "50%" in as_text([row])
    (unknown,) = make_rows(times, {}, 2, None)
    assert unknown.floor_us == 0 and "-" in as_text([unknown])


def test_pages_are_each_sequences_own() -> None:
    batch = profiled_batch(3, 33, 20, 97, 16, 20)
    used = batch.page_table[batch.page_table > 0]
    assert len(used) == len(set(used.tolist())) == 3 * 3 + 2
    assert batch.fed.tolist() == [True] * 3 + [False]
    assert attended(batch) == (Attended(3, 3 * 33, 3 * 33), Attended(20, 20, 20 * 21 // 2))
    with pytest.raises(ConfigError, match="need 12 KV pages; there are 11"):
        profiled_batch(4, 33, 0, 97, 16, 12)
    with pytest.raises(ConfigError, match="asks for a row"):
        profiled_batch(0, 33, 0, 97, 16, 12)


def test_a_profile_of_a_model_on_the_cpu(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model")
    config = ProfileConfig(
        model=str(folder), device="cpu", load_format="dummy", attention_backend="torch", batch=3, context=40, prompt=8,
        temperature=0.8, top_k=5, logprobs=2, frequency_penalty=0.5, steps=2, out=str(tmp_path / "out"),
    )  # fmt: skip  # one config
    found = profile_step(config)
    rows = {row.name: row for row in found.rows}
    layers = 2
    assert rows["attention"].calls == rows["gated product 160 x 48"].calls == layers and rows["sample"].calls == 1
    assert not rows.keys() & {"activation", "product 160 x 48"}, "one call is one row"
    assert rows["logprobs"].calls == 1
    assert {"embedding", "norm", "add and norm", "norm, rope and page write", "head 97 x 48"} <= set(rows)
    assert all(row.us > 0 for row in found.rows) and sum(row.share for row in found.rows) == pytest.approx(1.0)
    written = json.loads(found.kernels.read_text())
    assert written["device"] == "cpu" and len(written["rows"]) == len(rows)
    assert any(event.get("name") == "quire: attention" for event in json.loads(found.trace.read_text())["traceEvents"])


def test_the_command_leaves_the_work_to_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model")
    seen: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(subprocess, "run", run)
    assert quire_main(["profile", str(folder), "--batch", "3", "--kv-cache-dtype", "fp8"]) == 2
    (command,) = seen
    assert command[1:] == [
        "-m", "quire_worker.profile", "--model", str(folder), "--batch", "3", "--kv-cache-dtype", "fp8"
    ]  # fmt: skip  # one command

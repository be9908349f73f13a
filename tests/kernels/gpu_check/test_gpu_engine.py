"""`bench.gpu.engine`: what it loads are the real shapes, by the worker's own loader, and what it serves is counted."""

from __future__ import annotations

import dataclasses
import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.gpu import engine
from bench.gpu.engine import CONTEXT, Local, median_tpot_ms, rows_of, worker_config
from bench.gpu.figures import OVER_GREEDY, ROWS
from bench.gpu.shapes import SHAPES
from quire_common.sequence import Sampling
from quire_worker.config import CUDA_PAGE_SIZE, WorkerConfig
from quire_worker.cuda.load import step_tokens
from quire_worker.cuda.memory import kv_cache_bytes, step_bytes
from quire_worker.cuda.step_size import MOST_CHUNKS
from quire_worker.kv.page_geometry import kv_groups
from quire_worker.loading import LoadOptions
from quire_worker.model.parameters import parameter_specs
from quire_worker.model_source import load_configured
from tests.model.folders import read_source, write_config


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_describes_the_shape(name: str, tmp_path: Path) -> None:
    config = worker_config(tmp_path, name, 512, 0, eager=False)
    source = read_source(config.model, LoadOptions(max_model_len=config.max_model_len))
    assert source.spec == dataclasses.replace(SHAPES[name], max_positions=CONTEXT)
    assert config.max_num_seqs == 512 and config.load_format == "dummy" and config.device == "cuda"
    assert config.kv_cache_memory_bytes == 0, "a worker's own arithmetic says how many pages there are"


@pytest.mark.parametrize("total_gb", [80, 141])
def test_pages_of_the_large_shape_suffice_for_its_rows(total_gb: int) -> None:
    """With one of the smaller GPUs too: all prompts of a row, and of the longest one nine tenths."""
    spec = SHAPES["8B"]
    (group,) = kv_groups(spec, CUDA_PAGE_SIZE, "bfloat16")
    weights = 2 * sum(prod(each.shape) for each in parameter_specs(spec))
    reserve = step_bytes(spec, step_tokens(weights) + 512, 512 + MOST_CHUNKS, spec.vocab_size)
    total = total_gb * 10**9
    pages = kv_cache_bytes(total - weights, total, WorkerConfig().gpu_memory_utilization, reserve) // group.page_bytes
    for row in rows_of("8B", engine.KINDS, 512):
        needed = sum(-(-(p + o) // CUDA_PAGE_SIZE) for p, o in zip(row.prompts, row.outputs, strict=True))
        assert pages >= 0.9 * needed, row.name


def test_the_whole_table_of_a_tiny_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    engine.main(["--models", "tiny", "--smaller", "64", "--max-num-seqs", "8", "--out", str(out)])
    figures, told = json.loads(out.read_text()), capsys.readouterr().out
    rows = [row.name for row in rows_of("tiny", engine.KINDS, 8)]
    assert [*figures] == [f"tiny {row}" for row in rows] and {"itl 8", "prompt 1024", "logprobs 256"} <= set(rows)
    assert all(f"{title}: seconds" in told for title in figures)
    assert figures["tiny 512 x 512/256"]["output_tok_s"] * figures["tiny 512 x 512/256"]["seconds"] == pytest.approx(32)


def test_rows_that_were_measured_are_there_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks:
        """Stands for Local."""

        def serve(self, prompts: list[int], *_: object) -> dict[str, float]:
            if len(prompts) == 8:
                raise RuntimeError("broken")
            return {"first_ms": 1.0, "itl_ms": 1.0}

    monkeypatch.setattr(engine, "load", lambda *_, **__: Breaks())
    out = tmp_path / "figures.json"
    with pytest.raises(RuntimeError, match="broken"):
        engine.main(["--models", "0.6B", "--out", str(out)])
    assert json.loads(out.read_text()) == {"0.6B itl 1": {"first_ms": 1.0, "itl_ms": 1.0}}


def test_rows_are_those_that_something_is_wanted_of_and_prompts_of_other_lengths() -> None:
    named = {f"{model} {row.name}" for model in SHAPES for row in rows_of(model, engine.KINDS, 512)}
    over = {f"{model} {kind}" for model in SHAPES for kind in OVER_GREEDY}
    lengths = {f"{model} prompt {length}" for model in SHAPES for length in engine.LENGTHS}
    assert named == set(ROWS) | over | lengths | {f"{model} {engine.GREEDY}" for model in SHAPES}
    assert {row.name for row in rows_of("8B", ["itl"], 32)} == {"itl 1", "itl 8", "itl 32"}


def test_what_is_compared_is_served_by_turns() -> None:
    class Slower:
        """Stands for Local: a GPU that takes longer for each row than for the one before it."""

        def __init__(self) -> None:
            self.order: list[int] = []

        def serve(self, _prompts: list[int], _outputs: list[int], sampling: Sampling) -> dict[str, float]:
            self.order.append(sampling.logprobs)
            return {"first_ms": 1.0, "itl_ms": float(len(self.order))}

    local, rows = Slower(), rows_of("0.6B", ["logprobs", "single"], 512)
    found = dict(engine.measure(local, "0.6B", rows))  # type: ignore[arg-type]  # it serves, and no more is asked
    greedy, asked = Sampling().logprobs, 5
    assert local.order == [greedy] * 5 + [greedy, asked] * 3, "five tries of the one before, three turns of these"
    assert {row: figures["itl_ms"] for row, figures in found.items()} == {
        "0.6B prompt 1024": 1.0, "0.6B greedy 256": 8.0, "0.6B logprobs 256": 9.0,
    }, "the middle one of three counts"  # fmt: skip  # one line of figures


def test_what_was_served_is_counted(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", eos_token_id=...)
    config = WorkerConfig(model=str(folder), device="cpu", load_format="dummy", kv_cache_memory_bytes=1 << 20)
    local = Local(load_configured(config, lambda *_: None), 4)
    figures = local.serve([5, 40, 5, 5], [6, 6, 6, 6], Sampling())
    assert figures["steps"] >= 6 and figures["itl_ms"] > 0
    assert figures["tpot_ms"] * 5 < figures["seconds"] * 1000
    assert figures["output_tok_s"] * figures["seconds"] == pytest.approx(24)
    again = local.serve([5], [3], Sampling(temperature=0.8, top_k=5, seed=1, logprobs=2))
    assert again["output_tok_s"] * again["seconds"] == pytest.approx(3)
    assert 0 < again["tpot_ms"] * 2 <= again["seconds"] * 1000 - again["first_ms"] + 1e-6
    local.device.close()


def as_column(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_time_per_token_is_of_each_request_by_itself() -> None:
    """Slot 3 is taken again by another request, which is slower; slot 5 has one token only."""
    reported: list[tuple[float, list[int], list[int], list[int]]]
    reported = [(1.0, [3], [1], [0]), (2.0, [3, 5], [1, 1], [0, 2]), (3.0, [3], [1], [2]), (4.0, [3], [1], [0])]
    reported += [(9.0, [3], [1], [0]), (12.0, [3], [0], [2])]
    rows = [(now, as_column(slot), as_column(count), as_column(finish)) for now, slot, count, finish in reported]
    assert median_tpot_ms(rows[:3]) == 1000.0
    assert median_tpot_ms(rows) == (1000 + 8000) / 2
    assert median_tpot_ms([]) == 0.0

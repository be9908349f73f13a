"""`bench.gpu_engine`: what it loads are the real shapes, by the worker's own loader, and what it serves is counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.gpu_engine import CONTEXT, Local, worker_config
from bench.gpu_shapes import SHAPES
from quire_common.sequence import Sampling
from quire_worker.config import WorkerConfig
from quire_worker.loading import LoadOptions, read_source
from quire_worker.model_source import load_configured
from tests.unit.worker_model.folders import write_config


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_describes_the_shape(name: str, tmp_path: Path) -> None:
    config = worker_config(tmp_path, name, 512, 0, eager=False)
    source = read_source(config.model, LoadOptions(max_model_len=config.max_model_len), lambda *_: None)
    assert source.spec == dataclasses.replace(SHAPES[name], max_positions=CONTEXT)
    assert config.max_num_seqs == 512 and config.load_format == "dummy"


def test_what_was_served_is_counted(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", eos_token_id=...)
    config = WorkerConfig(model=str(folder), device="cpu", load_format="dummy", kv_cache_memory_bytes=1 << 20)
    local = Local(load_configured(config, lambda *_: None), 4)
    figures = local.serve([5, 40, 5, 5], [6, 6, 6, 6], Sampling())
    assert figures["steps"] >= 6 and figures["itl_ms"] > 0
    assert figures["output_tok_s"] * figures["seconds"] == pytest.approx(24)
    again = local.serve([5], [3], Sampling(temperature=0.8, top_k=5, seed=1, logprobs=2))
    assert again["output_tok_s"] * again["seconds"] == pytest.approx(3)
    local.device.close()

"""Each family's tiny model against transformers, in float32: logits, greedy tokens, chunks of prompts, cached prefixes.

A third of the families runs in `make test`, in turn by the number of commits; the others run in `make test-deep`. The
variable QUIRE_TEST_FAMILIES (0, 1 or 2) chooses the third.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_common.errors import Unsupported
from quire_worker.loading import LoadOptions, load_model
from quire_worker.model.arch_spec import ArchSpec
from quire_worker.ops.cpu.cpu_ops import CpuOps
from tests.model.batches import pages_for
from tests.oracle import Oracle, quiet_transformers
from tests.parity.families import CASES, in_turn, write_family
from tests.parity.model_runs import ANSWER, CUTS, LENGTH, SHARED, cached_pages, greedy, logits, logits_of_rows, prompt

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", in_turn(CASES))
def test_a_familys_model_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path)
    # The eager attention of transformers 5.23 adds ALiBi twice to a Falcon's scores.
    attention = "sdpa" if name == "falcon rw" else "eager"
    model, oracle = load_model(folder, LoadOptions(kv_cache_bytes=32 << 20)), Oracle(folder, attention)
    tokens = prompt()
    pages = pages_for(LENGTH + ANSWER, 1)
    whole = logits(model, tokens, pages, 0)
    wanted = oracle.logits(tokens)
    assert wanted.abs().max() > 0.5, "logits too small to mean anything"
    assert (whole - wanted).abs().max() < 1e-4
    other = pages_for(LENGTH + ANSWER, 30)
    assert torch.equal(logits(model, tokens, other, *CUTS), whole), "chunks change nothing"
    cached = cached_pages(pages, 60)
    assert torch.equal(logits(model, tokens, cached, SHARED), whole[SHARED:]), "a cached prefix changes nothing"
    some = [LENGTH - 1, 20]
    assert torch.equal(logits_of_rows(model, tokens, other, some), whole[some]), "rows that are left out change nothing"
    answer = greedy(model, tokens, pages, int(whole[-1].argmax()))
    divergence = oracle.first_divergence(tokens, answer)
    assert divergence is None or divergence.is_true_tie, divergence


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["afmoe", "qwen3-next"])
def test_a_missing_output_gate_would_be_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tokens = write_family(name, tmp_path), prompt()
    monkeypatch.setattr(CpuOps, "sigmoid_gate", lambda *_: None)
    model = load_model(folder, LoadOptions(kv_cache_bytes=4 << 20))
    found = logits(model, tokens, pages_for(LENGTH, 1), 0)
    assert (found - Oracle(folder).logits(tokens)).abs().max() > 1e-2


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("old", [{}, {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": YARN}])
def test_old_files_of_olmo3_have_a_rope_that_windows_do_not_scale(old: dict[str, Any], tmp_path: Path) -> None:
    folder, tokens = write_family("olmo3", tmp_path), prompt()
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    del fields["rope_parameters"]
    file.write_text(json.dumps(fields | old))
    model = load_model(folder, LoadOptions(kv_cache_bytes=4 << 20))
    assert isinstance(model.spec, ArchSpec)
    ropes = [each.rope for each in model.spec.attention]
    assert [rope.kind for rope in ropes if rope] == ["default"] * 3 + ["yarn" if "rope_scaling" in old else "default"]
    found = logits(model, tokens, pages_for(LENGTH, 1), 0)
    assert (found - Oracle(folder).logits(tokens)).abs().max() < 1e-4
    if "rope_scaling" in old:
        file.write_text(json.dumps(fields))
        assert (found - Oracle(folder).logits(tokens)).abs().max() > 1e-2, "the scaling changes nothing"


@pytest.mark.usefixtures("one_thread")
def test_overrides_make_an_old_file_of_olmo3_clear(tmp_path: Path) -> None:
    """The error and docs/models.md name them."""
    folder = write_family("olmo3", tmp_path)
    file = folder / "config.json"
    clear = json.loads(file.read_text())
    old = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    file.write_text(json.dumps({name: value for name, value in clear.items() if name != "rope_parameters"} | old))
    with pytest.raises(Unsupported, match="rope_theta"):
        load_model(folder, LoadOptions(kv_cache_bytes=4 << 20))
    overrides = {"rope_parameters": clear["rope_parameters"], "rope_scaling": None, "rope_theta": None}
    model = load_model(folder, LoadOptions(kv_cache_bytes=4 << 20, hf_overrides=overrides))
    file.write_text(json.dumps(clear))
    assert model.spec == load_model(folder, LoadOptions(kv_cache_bytes=4 << 20)).spec


def test_transformers_ignores_parts_of_old_files_of_olmo3() -> None:
    """Quire refuses such files. If this test fails, transformers reads them as their writers did, and so can Quire."""
    with quiet_transformers():
        from transformers import Olmo3Config

        olds: tuple[dict[str, Any], ...] = (
            {"rope_theta": 1e4},
            {"rope_parameters": YARN | {"rope_theta": 5e5}},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
        )
        read: list[Any] = [Olmo3Config.from_dict(old).rope_parameters for old in olds]
    base, section, kind = read
    assert (base["full_attention"]["rope_theta"], base["sliding_attention"]["rope_theta"]) == (1e4, 5e5)
    assert section["full_attention"]["rope_type"] == section["sliding_attention"]["rope_type"] == "default"
    assert kind["full_attention"]["rope_type"] == "default"


@pytest.mark.usefixtures("one_thread")
def test_a_short_context_has_the_short_factors_of_longrope(tmp_path: Path) -> None:
    """transformers chooses by the length at hand, the worker by the longest that it allows."""
    folder = write_family("phi3, longrope", tmp_path)
    tokens = prompt(60)
    short, long = (load_model(folder, LoadOptions(kv_cache_bytes=4 << 20, max_model_len=length)) for length in (64, 65))
    wanted = Oracle(folder).logits(tokens)
    found = logits(short, tokens, pages_for(60, 1), 0)
    assert (found - wanted).abs().max() < 1e-4
    assert (logits(long, tokens, pages_for(60, 1), 0) - wanted).abs().max() > 1e-2
    assert short.geometry.namespace != long.geometry.namespace, "neither may read the other's pages"

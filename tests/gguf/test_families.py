"""GGUF files of all families: a tiny model of transformers, converted as llama.cpp's converter does, computes what the
model of transformers does. Where transformers can read the GGUF file itself, its reading is the second witness."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType
from torch import Tensor

from quire_common.gguf import open_gguf
from quire_worker.loading import LoadedModel, LoadOptions, load_model
from quire_worker.model.architectures import ALL_FAMILIES
from tests.gguf.converter import ALIKE, CONVERSIONS, convert
from tests.gguf.families import ALIKE_FIELDS, CONVERTED, READ_BY_TRANSFORMERS, UNKNOWN
from tests.model.batches import Run, make_batch, pages_for
from tests.model.folders import read_source
from tests.oracle import Oracle
from tests.parity.families import CASES, in_turn, write_family

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH, ANSWER, TOLERANCE = 90, 4, 1e-4


def logits(model: LoadedModel, tokens: list[int]) -> Tensor:
    return model.runner.all_logits(make_batch([Run(tokens, 0, pages_for(len(tokens), 1))]))


def random_tokens() -> list[int]:
    return [int(token) for token in np.random.default_rng(1).integers(3, 131, LENGTH)]


def check(model: LoadedModel, oracle: Oracle) -> None:
    """Compare logits, and a greedy answer."""
    tokens = random_tokens()
    found, wanted = logits(model, tokens), oracle.logits(tokens)
    assert wanted.abs().max() > 0.5, "logits too small to mean anything"
    assert (found - wanted).abs().max() < TOLERANCE
    answer: list[int] = []
    while len(answer) < ANSWER:
        answer.append(int(logits(model, [*tokens, *answer])[-1].argmax()))
    divergence = oracle.first_divergence(tokens, answer)
    assert divergence is None or divergence.is_true_tie, divergence


@pytest.mark.parametrize("name", in_turn(name for name in CASES if name not in UNKNOWN))
def test_a_converted_model_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path / "model", **CONVERTED.get(name, {}))
    path = convert(CONVERSIONS[CASES[name][0]], folder, tmp_path / "model.gguf")
    model = load_model(path, LoadOptions(kv_cache_bytes=16 << 20))
    assert model.facts.architecture == load_model(folder, LoadOptions(kv_cache_bytes=16 << 20)).facts.architecture
    check(model, Oracle(folder))


@pytest.mark.parametrize("name", in_turn(READ_BY_TRANSFORMERS))
def test_transformers_reads_the_same_from_the_file(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path / "model", **READ_BY_TRANSFORMERS[name])
    path = convert(CONVERSIONS[CASES[name][0]], folder, tmp_path / "model.gguf")
    check(load_model(path, LoadOptions(kv_cache_bytes=16 << 20)), Oracle(path))


@pytest.mark.parametrize("name", ALIKE)
def test_a_model_like_another_is_computed_as_that(name: str, tmp_path: Path) -> None:
    """transformers does not have the model: llama.cpp's sources say which other it is like."""
    case, conversion = ALIKE[name]
    folder = write_family(case, tmp_path / "model", **ALIKE_FIELDS[case])
    path = convert(conversion, folder, tmp_path / "model.gguf")
    check(load_model(path, LoadOptions(kv_cache_bytes=16 << 20)), Oracle(folder))


@pytest.mark.parametrize("name", ["glm", "phi"])
def test_fused_queries_keys_and_values_are_read_as_separate_ones(name: str, tmp_path: Path) -> None:
    """So are those of ChatGLM 3, which transformers does not have, and of old files of Phi-2."""
    folder = write_family(name, tmp_path / "model", **CONVERTED.get(name, {}))
    path = convert(CONVERSIONS[CASES[name][0]], folder, tmp_path / "model.gguf", fused=True)
    tensors = open_gguf(path).tensors
    assert "blk.0.attn_qkv.bias" in tensors and "blk.0.attn_q.weight" not in tensors
    check(load_model(path, LoadOptions(kv_cache_bytes=16 << 20)), Oracle(folder))


def test_every_map_has_a_converted_model() -> None:
    maps = {files.architecture for family in ALL_FAMILIES for files in family.gguf}
    converted = {MODEL_ARCH_NAMES[CONVERSIONS[CASES[name][0]].architecture] for name in CASES if name not in UNKNOWN}
    assert maps == converted | ALIKE.keys()


def test_blocks_of_fused_matrices_are_cut_at_rows(tmp_path: Path) -> None:
    """Queries, keys, values, gate and up keep the blocks of the tensors that they lie in."""
    folder = write_family("phi3", tmp_path / "model", **READ_BY_TRANSFORMERS["phi3"])
    path = convert(CONVERSIONS["Phi3"], folder, tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    source = read_source(path)
    assert {kind.name for kind in source.block_kinds(LoadOptions()).values()} == {"Q8_0"}
    check(load_model(path, LoadOptions(kv_cache_bytes=16 << 20)), Oracle(path))


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gemmas_of_27b_scale_scores_by_the_width(name: str, layers: int, tmp_path: Path) -> None:
    """No key says so: as llama.cpp does, the worker knows the models by their layers."""
    folder = write_family(name, tmp_path / "model", num_hidden_layers=layers, query_pre_attn_scalar=16, head_dim=32)
    path = convert(CONVERSIONS[CASES[name][0]], folder, tmp_path / "model.gguf")
    spec = read_source(path).spec
    assert {each.scale for each in spec.attention} == {0.25}
    assert spec.attention == read_source(folder).spec.attention

"""Text of multimodal models against transformers' multimodal classes, in float32, for each layout of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire_worker.loading import LoadOptions, ModelImpl, load_model
from quire_worker.model.decoder import Decoder
from quire_worker.transformers_backend.decoder import TransformersDecoder
from tests.model.batches import pages_for
from tests.oracle import Oracle
from tests.parity.model_runs import ANSWER, LENGTH, greedy, logits, prompt
from tests.parity.multimodal_models import CASES, write_multimodal
from tests.tiers import deep_after

pytestmark = pytest.mark.usefixtures("one_thread")


def rename_to(layout: str, folder: Path) -> None:
    """Give the tensors the names that old or new checkpoints have."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    renamed = {}
    for name, tensor in tensors.items():
        text = name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
        plain = text.removeprefix("model.")
        if layout == "old":
            text = plain.replace("language_model.", "language_model.model.")
            text = f"language_model.{text}" if text.startswith("lm_head") else text
        elif not text.startswith("lm_head"):
            text = f"model.{plain}"
        renamed[text] = tensor
    assert len(renamed) == len(tensors)
    save_file(renamed, file)


@pytest.mark.parametrize("layout", ["", "old", "new"])
@pytest.mark.parametrize("name", deep_after(1, CASES))
def test_text_of_a_multimodal_model_is_what_transformers_computes(name: str, layout: str, tmp_path: Path) -> None:
    folder = write_multimodal(name, tmp_path)
    oracle, tokens, pages = Oracle(folder, model_class=CASES[name][0]), prompt(), pages_for(LENGTH + ANSWER, 1)
    if layout and name != "llama4":  # which has one layout
        rename_to(layout, folder)
    model = load_model(folder, LoadOptions(kv_cache_bytes=32 << 20))
    through_transformers = name in ("llama4", "mistral3, ministral3")
    assert isinstance(model.runner.decoder, TransformersDecoder if through_transformers else Decoder)
    found, wanted = logits(model, tokens, pages, 0), oracle.logits(tokens)
    assert wanted.abs().max() > 0.5, "logits too small to mean anything"
    assert (found - wanted).abs().max() < 1e-4
    divergence = oracle.first_divergence(tokens, greedy(model, tokens, pages, int(found[-1].argmax())))
    assert divergence is None or divergence.is_true_tie, divergence
    assert model.facts.eos_token_ids == (2,)


def test_both_implementations_take_the_text(tmp_path: Path) -> None:
    folder, tokens, pages = write_multimodal("gemma3", tmp_path), prompt(), pages_for(LENGTH, 1)
    found = []
    impls: tuple[ModelImpl, ...] = ("quire", "transformers")
    for impl in impls:
        model = load_model(folder, LoadOptions(kv_cache_bytes=32 << 20, model_impl=impl))
        found.append(logits(model, tokens, pages, 0))
        assert model.facts.architecture == "Gemma3ForCausalLM"
    assert (found[0] - found[1]).abs().max() < 1e-4


def test_overrides_reach_the_language_model(tmp_path: Path) -> None:
    folder = write_multimodal("gemma3", tmp_path)
    options = LoadOptions(kv_cache_bytes=4 << 20, hf_overrides={"max_position_embeddings": 64})
    assert load_model(folder, options).facts.max_model_len == 64
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | {"max_position_embeddings": 32}
    options = LoadOptions(kv_cache_bytes=4 << 20, hf_overrides={"text_config": text})
    assert load_model(folder, options).facts.max_model_len == 32


def test_pages_of_the_whole_and_of_its_text_alone_are_told_apart_by_weights(tmp_path: Path) -> None:
    """A tensor of the vision tower is no part of the digest: it changes no page."""
    folder = write_multimodal("gemma3", tmp_path)
    digests = [load_model(folder, LoadOptions(kv_cache_bytes=4 << 20)).facts.digest]
    for part in ("vision_tower", "language_model"):
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in tensors if part in name)
        save_file(tensors | {name: torch.ones_like(tensors[name])}, folder / "model.safetensors")
        digests.append(load_model(folder, LoadOptions(kv_cache_bytes=4 << 20)).facts.digest)
    assert digests[0] == digests[1] != digests[2]

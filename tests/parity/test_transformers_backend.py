"""Models in the Transformers backend, with Quire's pages and attention, against transformers alone, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.harness.local_engine import LocalEngine
from quire_common.sequence import Sequence, Stop
from quire_worker.loading import LoadedModel, LoadOptions, ModelImpl, load_model
from quire_worker.model.architectures import has_family
from quire_worker.model.config_file import ConfigFile, read_json
from quire_worker.transformers_backend.decoder import TransformersDecoder
from tests.model.batches import PAGE_SIZE, Run, make_batch, pages_for
from tests.oracle import Oracle
from tests.parity.families import write_family
from tests.parity.model_runs import ANSWER, CUTS, LENGTH, SHARED, cached_pages, greedy, logits, prompt
from tests.parity.transformers_models import CASES, write_transformers_model
from tests.tiers import deep_after

# No bits are promised: torch's products depend on the number of rows.
CLOSE = 1e-4
FORCED = ("gemma2", "llama, yarn", "qwen3", "opt", "cohere2", "starcoder2", "olmo3")

pytestmark = pytest.mark.usefixtures("one_thread")


def load(folder: Path, model_impl: ModelImpl) -> LoadedModel:
    return load_model(folder, LoadOptions(kv_cache_bytes=32 << 20, model_impl=model_impl))


@pytest.mark.parametrize("name", deep_after(1, CASES))
def test_a_model_without_a_family_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    folder = write_transformers_model(name, tmp_path)
    # If Quire gets a family for the model later, this test must run the Transformers backend still.
    has_own = has_family(ConfigFile(read_json(folder / "config.json")))
    model = load(folder, "transformers" if has_own else "auto")
    assert isinstance(model.runner.decoder, TransformersDecoder)
    oracle, tokens = Oracle(folder), prompt()
    pages = pages_for(LENGTH + ANSWER, 1)
    whole = logits(model, tokens, pages, 0)
    wanted = oracle.logits(tokens)
    assert wanted.abs().max() > 0.5, "logits too small to mean anything"
    assert (whole - wanted).abs().max() < CLOSE
    chunked = logits(model, tokens, pages_for(LENGTH + ANSWER, 30), *CUTS)
    assert (chunked - whole).abs().max() < CLOSE, "chunks change nothing"
    warm = logits(model, tokens, cached_pages(pages, 60), SHARED)
    assert (warm - whole[SHARED:]).abs().max() < CLOSE, "a cached prefix changes nothing"
    together = model.runner.all_logits(
        make_batch([Run(tokens[:40], 0, pages_for(LENGTH, 90)), Run(tokens[70:], 70, pages)])
    )
    assert (together[:40] - whole[:40]).abs().max() < CLOSE, "a sequence beside it changes nothing"
    assert (together[40:] - whole[70:]).abs().max() < CLOSE, "nor does it change that one"
    divergence = oracle.first_divergence(tokens, greedy(model, tokens, pages, int(whole[-1].argmax())))
    assert divergence is None or divergence.is_true_tie, divergence


@pytest.mark.parametrize("name", deep_after(1, FORCED))
def test_a_family_forced_through_transformers_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path)
    models, tokens, pages = [load(folder, "quire"), load(folder, "transformers")], prompt(), pages_for(LENGTH + 24, 1)
    own, forced = (logits(model, tokens, pages, 0) for model in models)
    assert (own - forced).abs().max() < CLOSE
    answers = [greedy(model, tokens, pages, int(own[-1].argmax()), 24) for model in models]
    assert answers[0] == answers[1]
    assert models[0].geometry.namespace != models[1].geometry.namespace, "neither may read the other's pages"
    assert models[0].geometry.groups == models[1].geometry.groups
    capabilities = [set(model.facts.capabilities) for model in models]
    assert capabilities[0] - capabilities[1] == {"batch_invariant"}, "no promise of bits"
    assert models[0].facts.parameters == models[1].facts.parameters


def test_streams_served_together_equal_transformers(tmp_path: Path) -> None:
    """Through scheduler and engine: prompts in chunks, and sequences that lose their pages and come back."""
    folder = write_transformers_model("gpt-oss", tmp_path)
    model, drawn = load(folder, "auto"), np.random.default_rng(7)
    prompts = [drawn.integers(3, 131, int(length)).astype(np.int32) for length in drawn.integers(3, 60, 12)]
    # Answers are longer than prompts, so that growth takes pages back however long the steps last.
    pages = sum(-(-(len(each) + 100) // PAGE_SIZE) for each in prompts)
    local = LocalEngine(
        model, max_num_seqs=12, num_pages=pages // 2, max_num_batched_tokens=64, long_prefill_token_threshold=48
    )
    for handle, each in enumerate(prompts):
        local.submit(handle, Sequence(each, Stop(max_tokens=100, ignore_eos=True)))
    served = local.run()
    local.check_quiet()
    assert local.scheduler.stats.preemptions > 0, "the pages sufficed: the test proves nothing"
    oracle = Oracle(folder)
    for handle, each in enumerate(prompts):
        divergence = oracle.first_divergence(each.tolist(), served[handle].tokens)
        assert divergence is None or divergence.is_true_tie, f"stream {handle} leaves transformers at {divergence}"


def test_rows_without_a_token_reach_the_model_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernels are compiled together before the first step: memory that they would write has anything."""
    decoder = load(write_transformers_model("helium", tmp_path), "transformers").runner.decoder
    assert isinstance(decoder, TransformersDecoder)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(decoder.ops, "positions", lambda plan: torch.zeros(3, dtype=torch.int64))
    monkeypatch.setattr(decoder._model, "hidden", lambda token, position: seen.append(token))
    decoder.forward(torch.tensor([-5, 7, 1 << 30]), torch.empty(0), None)
    assert seen[0].tolist() == [0, 7, decoder.spec.vocab_size - 1]


def test_dummy_weights_are_those_of_the_seed(tmp_path: Path) -> None:
    folder, tokens, pages = write_transformers_model("helium", tmp_path), prompt(20), pages_for(20, 1)
    (folder / "model.safetensors").unlink()
    options = [LoadOptions(load_format="dummy", seed=seed, kv_cache_bytes=4 << 20) for seed in (1, 1, 2)]
    models = [load_model(folder, each) for each in options]
    first, same, other = (logits(model, tokens, pages, 0) for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert len({model.facts.digest for model in models}) == 2

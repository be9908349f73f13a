"""Same sequence, same bits: alone, in any batch, in any chunks, on any pages, after anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire_common.credit import LogprobColumns
from quire_common.sequence import Sampling
from quire_worker.loading import LoadedModel, LoadOptions, load_model
from quire_worker.model.feed_forwards import DenseFeedForward
from quire_worker.sampling.logprobs import logprob_columns
from quire_worker.step import PromptScores
from tests.model.batches import PAGE_SIZE, Run, make_batch, pages_for
from tests.model.folders import FAMILIES, load_dummy_model, write_config
from tests.tiers import deep_after

VOCAB = 97
LONGEST = 200
PAGES_EACH = -(-LONGEST // PAGE_SIZE)


@pytest.fixture(scope="module", params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, threads: int, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_dummy_model(tmp_path_factory.mktemp("model"), **FAMILIES[request.param])


@pytest.fixture(scope="module", params=[12, 32], ids=["torch", "kernels"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_dummy_model(tmp_path_factory.mktemp("llama"), head_dim=request.param)


def tokens_of(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]


def whole(model: LoadedModel, token: list[int], first_page: int = 1) -> Tensor:
    return model.runner.all_logits(make_batch([Run(token, 0, pages_for(len(token), first_page))])).clone()


sequence = st.tuples(st.integers(0, 9), st.integers(1, LONGEST), st.lists(st.integers(1, 90), min_size=1, max_size=8))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequences=st.lists(sequence, min_size=1, max_size=5), order=st.integers(0, 100))
def test_chunks_and_company_change_nothing(
    model: LoadedModel, sequences: list[tuple[int, int, list[int]]], order: int
) -> None:
    """Each sequence advances by its own chunk sizes (1: a decode), in steps shared with whoever is left."""
    texts = [tokens_of(seed, length) for seed, length, _ in sequences]
    done = [0] * len(sequences)
    found: list[list[Tensor]] = [[] for _ in sequences]
    turn = 0
    while any(done[i] < len(texts[i]) for i in range(len(texts))):
        left = [i for i in range(len(texts)) if done[i] < len(texts[i])]
        left = left[order % len(left) :] + left[: order % len(left)]
        chunk = {i: texts[i][done[i] : done[i] + sequences[i][2][turn % len(sequences[i][2])]] for i in left}
        runs = [Run(chunk[i], done[i], pages_for(LONGEST, 1 + i * PAGES_EACH)) for i in left]
        logits = model.runner.all_logits(make_batch(runs))
        begin = 0
        for i in left:
            found[i].append(logits[begin : begin + len(chunk[i])].clone())
            begin += len(chunk[i])
            done[i] += len(chunk[i])
        turn += 1
    for i, text in enumerate(texts):
        assert torch.equal(torch.cat(found[i]), whole(model, text, 70))


def test_prompt_logprobs_are_those_of_the_rows_logits(llama: LoadedModel) -> None:
    """In chunks beside others, whose tokens they do not change; more rows than are scored at once."""
    text, other = tokens_of(1, 190), tokens_of(2, 30)
    logits = whole(llama, text)
    expected = logprob_columns(logits[:-1], np.array(text[1:], np.int32), np.full(len(text) - 1, 3, np.int32))
    assert expected is not None
    found: list[LogprobColumns] = []
    for begin, end in ((0, 1), (1, 150), (150, 190)):
        runs = [
            Run(other[:20], 0, pages_for(LONGEST, 1 + PAGES_EACH), logprobs=1),
            Run(text[begin:end], begin, pages_for(LONGEST, 1), sample=end == len(text)),
        ]
        plain = llama.runner.run(make_batch(runs))
        batch = make_batch(runs)
        batch.scores = {1: PromptScores(np.array(text[begin + 1 : end + 1], np.int32), 3)}
        output = llama.runner.run(batch)
        assert output.token.tolist() == plain.token.tolist()
        found.append(output.scores[1])
        assert found[-1].token_index.tolist() == list(range(len(text[begin + 1 : end + 1])))
    for name in ("logprob", "rank", "top_count", "top_id", "top_logprob"):
        np.testing.assert_array_equal(np.concatenate([getattr(each, name) for each in found]), getattr(expected, name))


def test_the_last_feed_forward_block_computes_only_rows_that_sample(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, other = tokens_of(1, 150), tokens_of(2, 30)
    rows, run = list[int](), DenseFeedForward.run

    def recorded(self: DenseFeedForward[Any], ops: Any, x: Tensor, onto: Tensor | None) -> Tensor | None:
        rows.append(len(x))
        return run(self, ops, x, onto)

    monkeypatch.setattr(DenseFeedForward, "run", recorded)
    multiple = llama.runner.decoder.ops.row_multiple
    for begin, end, sampled in ((0, 100, 1), (100, 150, 2)):
        ends = end == len(text)
        runs = [
            Run(text[begin:end], begin, pages_for(LONGEST, 1), sample=ends),
            Run(other, 0, pages_for(LONGEST, 1 + PAGES_EACH)),
        ]
        logits = llama.runner.all_logits(make_batch(runs))
        rows.clear()
        token = llama.runner.run(make_batch(runs)).token.tolist()
        assert token == [int(logits[at].argmax()) for at in ([end - begin - 1] if ends else []) + [-1]]
        assert len(token) == sampled
        all_rows = -(-(end - begin + len(other)) // multiple) * multiple
        assert rows[:-1] == [all_rows] * (len(rows) - 1) and rows[-1] == -(-sampled // multiple) * multiple
    rows.clear()
    assert not llama.runner.run(make_batch([Run(text, 0, pages_for(LONGEST, 1), sample=False)])).token.size
    assert rows[-1] == multiple, "a step that samples nothing still ends"


@pytest.mark.parametrize("head_dim", [12, 32])
def test_logits_match_across_thread_counts(tmp_path: Path, head_dim: int) -> None:
    token = tokens_of(1, 150)
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(whole(load_dummy_model(tmp_path, head_dim=head_dim), token))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_the_page_size_changes_nothing(llama: LoadedModel, tmp_path: Path, page_size: int) -> None:
    """Tiles lie at the same positions under all of them."""
    write_config(tmp_path, head_dim=llama.spec.head_dim)
    options = LoadOptions(load_format="dummy", seed=1, kv_cache_bytes=4 << 20, page_size=page_size)
    text = tokens_of(6, 150)
    pages = list(range(1, 1 + -(-len(text) // page_size)))
    found = load_model(tmp_path, options).runner.all_logits(make_batch([Run(text, 0, pages)]))
    assert torch.equal(found, whole(llama, text))


def generate(
    model: LoadedModel, settings_of: list[dict[str, Any]], prompts: list[list[int]], length: int
) -> list[list[int]]:
    """Prefill all prompts in one step, then decode together; sequences that end early leave the batch."""
    text = [list(prompt) for prompt in prompts]
    position = [0] * len(text)
    for step in range(length):
        active = [i for i in range(len(text)) if step < length - i % 3]
        runs = [
            Run(text[i][position[i] :], position[i], pages_for(LONGEST, 1 + i * PAGES_EACH), **settings_of[i])
            for i in active
        ]
        output = model.runner.run(make_batch(runs))
        for i, token in zip(active, output.token.tolist(), strict=True):
            position[i] = len(text[i])
            text[i].append(token)
    return [each[len(prompt) :] for each, prompt in zip(text, prompts, strict=True)]


SAMPLING: list[dict[str, Any]] = [
    {"sampling": sampling}
    for sampling in (
        Sampling(),
        Sampling(temperature=0.8, seed=5),
        Sampling(temperature=1.0, seed=2**63 + 9, top_p=0.9),
        Sampling(temperature=1.2, seed=6, top_k=20, min_p=0.01),
        Sampling(temperature=0.8, seed=5, sample=1),
    )
]


def test_generation_alone_and_together(llama: LoadedModel) -> None:
    prompts = [tokens_of(seed, length) for seed, length in ((1, 5), (2, 60), (3, 33), (4, 1), (1, 5))]
    together = generate(llama, SAMPLING, prompts, 20)
    for index, prompt in enumerate(prompts):
        alone = generate(llama, [SAMPLING[index]], [prompt], 20)[0]
        assert alone[: len(together[index])] == together[index]
    assert together[1] != together[4][: len(together[1])], "siblings must differ"


def test_a_draw_survives_preemption(llama: LoadedModel) -> None:
    """Recomputing prompt and outputs as one prefill gives the next token that decoding would have given."""
    prompt = tokens_of(7, 30)
    drawn = generate(llama, [SAMPLING[1]], [prompt], 10)[0]
    for kept in (1, 4, 9):
        text = prompt + drawn[:kept]
        output = llama.runner.run(make_batch([Run(text, 0, pages_for(len(text), 40), **SAMPLING[1])]))
        assert output.token.tolist() == [drawn[kept]]


def test_only_what_samples_yields_tokens(llama: LoadedModel) -> None:
    runs = [
        Run(tokens_of(1, 9), 0, [1], sample=False),
        Run(tokens_of(2, 9), 0, [2], logprobs=2),
        Run(tokens_of(3, 9), 0, [3], sample=False, logprobs=5),
        Run(tokens_of(4, 9), 0, [4]),
    ]
    output = llama.runner.run(make_batch(runs))
    logits = llama.runner.all_logits(make_batch(runs))
    assert output.token.tolist() == [logits[17].argmax(), logits[35].argmax()]
    assert output.logprobs is not None and output.logprobs.token_index.tolist() == [0]
    assert output.logprobs.top_id.tolist() == logits[17].topk(2).indices.tolist()
    assert np.allclose(output.logprobs.logprob, logits[17].log_softmax(-1).max())
    quiet = llama.runner.run(make_batch([run for run in runs if not run.sample]))
    assert quiet.token.size == 0 and quiet.logprobs is None
    assert output.timing.forward_us > 0


def test_blocked_tokens_follow_their_sequence(llama: LoadedModel) -> None:
    free = [Run(tokens_of(n, 12), 0, [n + 1]) for n in range(3)]
    best = llama.runner.run(make_batch(free)).token.tolist()
    held = [
        Run(free[0].token, 0, [1], sample=False, blocked=[best[0]]),
        free[1],
        Run(free[2].token, 0, [3], blocked=[best[2], 1]),
    ]
    found = llama.runner.run(make_batch(held)).token.tolist()
    logits = llama.runner.all_logits(make_batch(held))[35]
    assert found[0] == best[1]
    assert found[1] == next(t for t in logits.argsort(descending=True).tolist() if t not in (best[2], 1))


@pytest.mark.parametrize("poison", deep_after(1, [float("nan"), float("inf"), 1e30]))
def test_stale_pages_spoil_nobody(llama: LoadedModel, poison: float) -> None:
    """Pages that a damaged sequence left behind are granted to another, some of them ahead of need."""
    text = tokens_of(3, 50)
    wanted = whole(llama, text, 20)
    llama.runner.pool.tensor[1:12] = poison
    parts = []
    for begin, end in ((0, 20), (20, 21), (21, 50)):
        run = Run(text[begin:end], begin, [3, 9, 5, 7, 11, 2, 4, 6])
        parts.append(llama.runner.all_logits(make_batch([run])).clone())
    llama.runner.pool.tensor[1:12] = 0
    assert torch.equal(torch.cat(parts), wanted)


def test_damage_stays_with_its_sequence(llama: LoadedModel) -> None:
    """A page that came damaged ends its own sequence, and no other of the step."""
    text = tokens_of(5, 40)
    runs = [Run(text[32:], 32, [1, 2, 3]), Run(text[32:], 32, [4, 5, 6])]
    for first in (1, 4):
        llama.runner.run(make_batch([Run(text[:32], 0, [first, first + 1], sample=False)]))
    sound = llama.runner.run(make_batch(runs)).token.tolist()
    assert sound[0] == sound[1]
    llama.runner.pool.tensor[2, 0, 1, 1, 3, 0] = float("nan")
    assert llama.runner.run(make_batch(runs)).token.tolist() == [-1, sound[1]]
    llama.runner.pool.tensor[1:7] = 0


def test_moved_pages_continue_a_sequence(llama: LoadedModel) -> None:
    text = tokens_of(8, 48)
    wanted = whole(llama, text, 20)[32:]
    llama.runner.run(make_batch([Run(text[:32], 0, [1, 2], sample=False)]))
    pool = llama.runner.pool
    for source, target in ((1, 9), (2, 4)):
        pool.write_page(target, bytes(pool.read_page(source)))
    found = llama.runner.all_logits(make_batch([Run(text[32:], 32, [9, 4, 7])]))
    assert torch.equal(found, wanted)

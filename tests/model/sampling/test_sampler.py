from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire_worker.sampling.gumbel import noise_of_rows
from quire_worker.sampling.sampler import sample
from quire_worker.step import DAMAGED, NOTHING_LEFT
from tests.model.sampling.sampling_columns import columns
from tests.tiers import deep_after


def distribution(
    logits: NDArray[Any], temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float = 1.0
) -> NDArray[np.float64]:
    """The plain reading of the definition, in float64 and with a full sort."""
    z = logits.astype(np.float64) / temperature
    weight = np.exp(z - z.max())
    keep = weight >= min_p
    if 0 < top_k < z.size:
        keep &= z >= np.sort(z)[-top_k]
    if top_p < 1:
        mass = np.where(keep, weight, 0.0)
        larger = np.array([mass[z > each].sum() for each in z])
        keep &= larger < max(top_p, 1e-300) * mass.sum()
    kept = np.where(keep, weight, 0.0)
    probability: NDArray[np.float64] = kept / kept.sum()
    return typical(probability, typical_p) if typical_p < 1 else probability


def typical(p: NDArray[np.float64], typical_p: float) -> NDArray[np.float64]:
    """The least set of tokens by |-log p - H| whose mass reaches typical_p, all equals of the last included."""
    with np.errstate(divide="ignore"):
        surprise = -np.log(p)
    entropy = (p[p > 0] * surprise[p > 0]).sum()
    shifted = np.abs(surprise - entropy)
    reached = np.array([p[shifted <= each].sum() for each in shifted])
    kept = np.where(shifted <= shifted[reached >= typical_p * (1 - 1e-12)].min(), p, 0.0)
    found: NDArray[np.float64] = kept / kept.sum()
    return found


def test_typical_p_drops_what_is_likelier_than_typical() -> None:
    """A token of three tenths of the mass, and many that share the rest: nearest to the entropy are the many."""
    logits = torch.zeros(1, 33)
    logits[0, 4] = float(np.log(32 * 3 / 7))
    found = sample(logits.expand(200, -1), columns(200, typical_p=0.4, seed=np.arange(200)))
    assert 4 not in found and len(set(found.tolist())) > 20


def test_typical_p_keeps_a_token_however_small() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0, -3.0]])
    assert set(sample(logits.expand(50, -1), columns(50, typical_p=1e-6, seed=np.arange(50))).tolist()) == {1}


def test_typical_p_treats_equals_alike() -> None:
    logits = torch.zeros(300, 4096)
    assert len(set(sample(logits, columns(300, typical_p=0.01, seed=np.arange(300))).tolist())) > 250


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    assert sample(logits, columns(2, temperature=0.0)).tolist() == [1, 0]


def test_greedy_is_not_disturbed_by_filters() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    found = sample(logits, columns(3, temperature=0.0, top_k=3, top_p=0.1, min_p=0.5, seed=[1, 2, 3]))
    assert found.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_damaged_row_fails_alone(bad: float, temperature: float, top_k: int) -> None:
    logits = torch.zeros(3, 64)
    logits[:, 9] = 40.0
    logits[1, 5] = bad
    assert sample(logits, columns(3, temperature=temperature, top_k=top_k)).tolist() == [9, DAMAGED, 9]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_blocked_tokens_are_not_drawn_and_logits_stay(temperature: float) -> None:
    logits = torch.zeros(2, 8)
    logits[:, 3] = 90.0
    logits[:, 6] = 45.0
    before = logits.clone()
    found = sample(logits, columns(2, temperature=temperature, blocked={1: np.array([3], np.int32)}))
    assert found.tolist() == [3, 6]
    assert torch.equal(logits, before)


def test_a_row_with_everything_blocked_has_nothing_left() -> None:
    assert sample(torch.zeros(1, 4), columns(1, blocked={0: np.arange(4, dtype=np.int32)})).tolist() == [NOTHING_LEFT]


row_settings = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([-1, 0, 1, 3, 40, 500]),
        "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        "typical_p": st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.1]),
        "seed": st.integers(0, 2**64 - 1),
        "sample_index": st.integers(0, 3),
        "position": st.integers(0, 10_000),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(row_settings, min_size=1, max_size=6),
    st.integers(2, 300),
    st.sampled_from([0.5, 4.0, 60.0]),
    st.integers(0, 9),
)
def test_a_row_is_what_it_is_alone_and_by_definition(
    rows: list[dict[str, Any]], vocab_size: int, spread: float, seed: int
) -> None:
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    together = sample(logits, columns(len(rows), **{name: [row[name] for row in rows] for name in rows[0]}))
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1], columns(1, **row))
        assert alone[0] == together[index]
        if row["temperature"] == 0.0:
            assert together[index] == logits[index].argmax()
            continue
        wanted = distribution(
            logits[index].numpy(),
            row["temperature"],
            row["top_k"],
            float(np.float32(row["top_p"])),
            float(np.float32(row["min_p"])),
            float(np.float32(row["typical_p"])),
        )
        noise = noise_of_rows(
            np.array([row["seed"]], np.uint64),
            np.array([row["sample_index"]], np.uint32),
            np.array([row["position"]], np.int64),
            vocab_size,
        )
        with np.errstate(divide="ignore"):
            score = np.log(wanted) + noise[0]
        best = np.sort(score)[-2:]
        # Rounding may decide where the two best scores, or a filter's edge, agree to float32.
        if best[1] - best[0] > 1e-4 and not _near_an_edge(logits[index].numpy(), row):
            assert together[index] == score.argmax()


def _near_an_edge(logits: NDArray[Any], row: dict[str, Any]) -> bool:
    """Whether nudging the filters changes what they keep."""
    kept = {
        tuple(
            distribution(
                logits,
                row["temperature"],
                row["top_k"],
                row["top_p"] * scale,
                min(1.0, row["min_p"] * scale),
                row["typical_p"] * (scale if row["typical_p"] < 1 else 1),
            ).nonzero()[0]
        )
        for scale in (1 - 1e-5, 1 + 1e-5)
    }
    return len(kept) > 1 or _distances_meet(logits, row)


def _distances_meet(logits: NDArray[Any], row: dict[str, Any]) -> bool:
    """Whether a token on either side of the entropy is about as far from it as one that typical_p cuts at."""
    if row["typical_p"] == 1:
        return False
    p = distribution(logits, row["temperature"], row["top_k"], row["top_p"], row["min_p"])
    p = p[p > 0]
    shifted = np.abs(-np.log(p) + (p * np.log(p)).sum())
    below = shifted[-np.log(p) < -(p * np.log(p)).sum()]
    above = shifted[-np.log(p) >= -(p * np.log(p)).sum()]
    return bool(len(below) and len(above) and np.abs(below[:, None] - above[None, :]).min() < 1e-4)


@pytest.mark.parametrize(
    "filters",
    deep_after(
        1,
        [
            {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
            {},
            {"temperature": 0.7},
            {"top_k": 5},
            {"top_p": 0.8},
            {"min_p": 0.1},
            {"typical_p": 0.6},
            {"temperature": 1.2, "top_p": 0.9, "typical_p": 0.5},
        ],
    ),
)
def test_frequencies_match_a_float64_reference(filters: dict[str, Any]) -> None:
    samples, vocab_size = 6000, 24
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(11)) * 1.5
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    wanted = distribution(logits.numpy(), **full)
    # Seeds for one half, positions for the other: both must be random.
    seed, position = np.arange(samples) // 2, np.arange(samples) % 2 * 1000 + 7
    found = sample(logits.expand(samples, -1), columns(samples, **full, seed=seed, position=position))
    counts = np.bincount(found, minlength=vocab_size)
    support = wanted > 0
    assert counts[~support].sum() == 0
    expected = wanted[support] * samples
    statistic = ((counts[support] - expected) ** 2 / expected).sum()
    degrees = support.sum() - 1
    # Mean + 5 deviations of chi-square; the draws are fixed by their keys, so this cannot flicker.
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def test_siblings_and_positions_draw_differently() -> None:
    logits = torch.zeros(40, 1000)
    drawn = sample(logits, columns(40, seed=9, sample_index=np.arange(40) % 20, position=np.arange(40) // 20))
    assert len(set(drawn.tolist())) > 30

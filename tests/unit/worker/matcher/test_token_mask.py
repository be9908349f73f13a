"""Masks of grammars: what they forbid, and where they let blocked tokens be drawn after all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.param_rows import param_rows
from quire_worker.sampling.sampler import sample
from quire_worker.sampling.token_mask import MaskBuilder, MaskKind, TokenMask, bit_words
from quire_worker.step import DAMAGED, NOTHING_LEFT
from tests.fakes.worker.token_masks import mask_of

VOCAB, EOS = 77, (3, 70)


def mask(*tokens: int) -> TokenMask:
    return mask_of(VOCAB, EOS, tokens)


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        ((5,), MaskKind.ONE),
        ((31,), MaskKind.ONE),
        ((63,), MaskKind.ONE),
        ((64,), MaskKind.ONE),
        ((76,), MaskKind.ONE),
        ((5, 6), MaskKind.BITS),
        ((5, 76), MaskKind.BITS),
        ((3, 5), MaskKind.BITS),
        ((3,), MaskKind.END),
        ((70, 3), MaskKind.END),
    ],
)
def test_mask_forbids_all_other_tokens_whatever_its_kind(tokens: tuple[int, ...], kind: MaskKind) -> None:
    found = mask(*tokens)
    assert found.kind is kind
    assert np.flatnonzero(~found.forbidden(VOCAB)).tolist() == sorted(tokens)
    logits = np.arange(VOCAB, dtype=np.float32)
    found.restrict(logits)
    assert np.flatnonzero(np.isfinite(logits)).tolist() == sorted(tokens) and logits[tokens[0]] == tokens[0]


def test_mask_of_no_token_is_none() -> None:
    assert MaskBuilder(VOCAB, EOS).build(bit_words(VOCAB, ())) is None


@pytest.mark.parametrize("tokens", [(5,), (5, 6), (3, 70), (31, 63)])
def test_mask_knows_whether_other_tokens_are_left(tokens: tuple[int, ...]) -> None:
    found = mask(*tokens)
    assert found.allows_only(np.array([*tokens, 9], np.int32))
    assert not found.allows_only(np.array([*tokens[1:], 9], np.int32))


def drawn(allowed: TokenMask, blocked: tuple[int, ...] = (), temperature: float = 0.0) -> int:
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(1, VOCAB)).astype(np.float32))
    params = param_rows(1, temperature=temperature, seed=7)
    ids = {0: np.array(blocked, np.int32)} if blocked else {}
    return int(sample(logits, SamplingColumns(params, np.array([9]), blocked=ids, masks={0: allowed}))[0])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    assert drawn(mask(5, 40, 60), temperature=temperature) in (5, 40, 60)
    assert drawn(mask(41), temperature=temperature) == 41


def test_blocked_tokens_are_drawn_only_where_the_grammar_leaves_no_other() -> None:
    assert drawn(mask(3, 41), blocked=EOS) == 41
    assert drawn(mask(3, 70), blocked=EOS) in EOS


def test_row_has_nothing_to_draw_where_the_request_forbids_all_that_its_grammar_allows() -> None:
    logits = torch.full((1, VOCAB), -np.inf)
    logits[0, 8] = 1.0
    columns = SamplingColumns(param_rows(1), np.array([9]), masks={0: mask(5, 6)})
    assert sample(logits, columns).tolist() == [NOTHING_LEFT]


@pytest.mark.parametrize("damage", [np.nan, np.inf])
@pytest.mark.parametrize("token", [5, 60])
def test_damage_shows_wherever_it_lies_and_in_its_own_row_alone(damage: float, token: int) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, token] = damage
    columns = SamplingColumns(param_rows(2), np.array([9, 9]), masks={0: mask(5), 1: mask(6)})
    assert sample(logits, columns).tolist() == [DAMAGED, 6]

"""The ring of masks: a reader believes what is whole and its own, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from quire_worker.matcher.mask_ring import KIND_AND_TOKEN_AT, MaskRing
from quire_worker.sampling.token_mask import MaskKind, TokenMask
from tests.fakes.worker.token_masks import mask_of

VOCAB = 100


@pytest.fixture
def ring() -> MaskRing:
    return MaskRing.create(4, 2, VOCAB)


def mask(*tokens: int) -> TokenMask:
    return mask_of(VOCAB, (1,), tokens)


def allowed(found: TokenMask | None) -> list[int]:
    assert found is not None
    return np.flatnonzero(~found.forbidden(VOCAB)).tolist()


@pytest.mark.parametrize("tokens", [(7,), (7, 99), (1,)])
def test_mask_is_read_as_it_was_left(ring: MaskRing, tokens: tuple[int, ...]) -> None:
    ring.put(2, 5, 17, mask(*tokens))
    found = ring.mask_at(2, 5, 17)
    assert found is not None and found.kind is mask(*tokens).kind and allowed(found) == sorted(tokens)


def test_other_position_slot_or_sequence_has_no_mask(ring: MaskRing) -> None:
    ring.put(2, 5, 17, mask(7, 8))
    assert ring.mask_at(2, 5, 16) is ring.mask_at(2, 5, 19) is ring.mask_at(1, 5, 17) is ring.mask_at(2, 6, 17) is None


def test_masks_of_two_positions_are_there_at_once(ring: MaskRing) -> None:
    for position in (17, 18, 19):
        ring.put(0, 1, position, mask(position, 50))
    assert allowed(ring.mask_at(0, 1, 18)) == [18, 50] and allowed(ring.mask_at(0, 1, 19)) == [19, 50]
    assert ring.mask_at(0, 1, 17) is None


def test_mask_that_is_half_written_is_not_read(ring: MaskRing) -> None:
    """Whatever order a machine's stores come in: bits of the next mask beside the head of this one, and the reverse."""
    entries = []
    for position, tokens in ((20, (7, 8)), (22, (9, 10))):
        ring.put(0, 1, position, mask(*tokens))
        (_, begin), size = ring._entry_of(0, position), ring.entry_bytes
        entries.append(ring._map[begin : begin + size])
    for cut in range(1, size):
        if entries[0][:cut] != entries[1][:cut] and entries[0][cut:] != entries[1][cut:]:
            for first, last in (entries, entries[::-1]):
                ring._map[begin : begin + size] = first[:cut] + last[cut:]
                assert ring.mask_at(0, 1, 20) is None and ring.mask_at(0, 1, 22) is None, cut


def test_head_of_rubbish_is_no_mask(ring: MaskRing) -> None:
    ring.put(0, 1, 20, mask(7, 8))
    _, begin = ring._entry_of(0, 20)
    ring._map[begin + KIND_AND_TOKEN_AT] = 200  # the kind
    assert ring.mask_at(0, 1, 20) is None


def test_process_and_engine_share_the_ring(ring: MaskRing) -> None:
    process = MaskRing(ring.fd, ring.mask_slots, ring.entries_per_slot, VOCAB)
    process.put(3, 9, 4, mask(11))
    process.count_mask(0, 500)
    process.count_mask(2, 70)
    process.set_busy(1, 9)
    found = ring.mask_at(3, 9, 4)
    assert found is not None and found.kind is MaskKind.ONE and found.token == 11
    assert ring.mask_totals == (2, 570)
    assert ring.pop_busy() == {9} and ring.pop_busy() == set()

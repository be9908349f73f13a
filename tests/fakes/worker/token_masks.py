"""Masks of given tokens, as the matcher makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_worker.sampling.token_mask import MaskBuilder, bit_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_worker.sampling.token_mask import TokenMask


def mask_of(vocab_size: int, eos: Sequence[int], tokens: Sequence[int]) -> TokenMask:
    """The mask of these tokens, of which there is at least one."""
    found = MaskBuilder(vocab_size, eos).build(bit_words(vocab_size, tokens))
    assert found is not None
    return found

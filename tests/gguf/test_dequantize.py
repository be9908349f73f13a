"""Blocks of every kind against the gguf package, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf import dequantize as theirs

from quire_common.gguf import BLOCK_KINDS
from quire_worker.weights.gguf.dequantize import READABLE_KINDS, can_dequantize, dequantize

BLOCKS = 1000
BY_NAME = {kind.name: (number, kind) for number, kind in BLOCK_KINDS.items()}


@pytest.mark.parametrize("name", READABLE_KINDS)
def test_random_blocks_are_the_gguf_packages(name: str) -> None:
    number, kind = BY_NAME[name]
    raw = np.random.default_rng(number).integers(0, 256, BLOCKS * kind.num_bytes, dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales are infinite and worse at times
        found = dequantize(kind, raw)
        wanted = theirs(raw.reshape(BLOCKS, -1), GGMLQuantizationType(number))
    assert found.dtype == np.float32 and found.shape == (BLOCKS * kind.values,)
    wanted = np.asarray(wanted, np.float32).reshape(-1)
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    finite = ~np.isnan(wanted)
    assert np.array_equal(found[finite].view(np.uint32), wanted[finite].view(np.uint32))
    assert finite.mean() > 0.9


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_come_back_near_what_was_quantised(name: str) -> None:
    from gguf import quantize

    number, kind = BY_NAME[name]
    weights = np.random.default_rng(1).normal(size=(64, 256)).astype(np.float32)
    raw = np.asarray(quantize(weights, GGMLQuantizationType(number)))
    found = dequantize(kind, raw.reshape(-1)).reshape(weights.shape)
    assert np.abs(found - weights).max() < {"4": 0.4, "5": 0.2, "8": 0.02}[name[1]]


def test_other_kinds_are_known_and_not_read() -> None:
    unread = {kind.name for kind in BLOCK_KINDS.values() if not can_dequantize(kind)}
    assert {"IQ2_XXS", "MXFP4", "I32", "Q8_K"} <= unread and "Q4_K" not in unread

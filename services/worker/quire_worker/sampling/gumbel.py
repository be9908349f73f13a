"""Counter-based Gumbel noise: a pure function of (seed, sample index, position, token id).

Exact definition, in real numbers; computed in float64:

    key     = (low 32 bits of seed, high 32 bits of seed)
    counter = (token_id // 4, position, sample_index, 0)
    word    = philox4x32_10(counter, key)[token_id % 4]
    u       = ((word >> 8) + 1/2) / 2**24          strictly between 0 and 1
    noise   = -log(-log(u))                        between -2.86 and 17.33

So a token's noise depends on no other token, row or step. Elementwise functions here give the same bits wherever in an
array an element lies; a test holds them to it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from quire_worker.arrays import Int64, UInt32, UInt64
from quire_worker.sampling.philox import philox, split_seed

LANES = 4
_WORD_SHIFT = np.uint64(8)
Float64 = NDArray[np.float64]


def noise_of_rows(seed: UInt64, sample_index: UInt32, position: Int64, vocab_size: int) -> Float64:
    """Compute the Gumbel noise of every token of the vocabulary for N rows: columns [N] -> float64 [N, vocab_size]."""
    blocks = -(-vocab_size // LANES)
    low, high = split_seed(seed[:, None])
    counter = (
        np.arange(blocks, dtype=np.uint64)[None, :],
        position[:, None].astype(np.uint64),
        sample_index[:, None].astype(np.uint64),
        np.zeros((1, 1), np.uint64),
    )
    words = np.empty((seed.size, blocks, LANES), np.float64)
    for lane, word in enumerate(philox(counter, (low, high))):
        words[:, :, lane] = word >> _WORD_SHIFT
    return _noise(words.reshape(seed.size, blocks * LANES))[:, :vocab_size]


def noise_of_tokens(seed: UInt64, sample_index: UInt32, position: Int64, token: Int64) -> Float64:
    """Compute the Gumbel noise of single tokens: columns [N], one token id each -> float64 [N]. It is the same as in
    `noise_of_rows`."""
    counter = (
        (token // LANES).astype(np.uint64),
        position.astype(np.uint64),
        sample_index.astype(np.uint64),
        np.zeros(token.size, np.uint64),
    )
    words = np.stack(philox(counter, split_seed(seed)))
    chosen = words[token % LANES, np.arange(token.size)]
    return _noise((chosen >> _WORD_SHIFT).astype(np.float64))


def _noise(top_bits: Float64) -> Float64:
    """Compute noise from 24-bit integers held as float64, in place."""
    uniform = torch.from_numpy(top_bits).add_(0.5).mul_(2.0**-24)
    uniform.log_().neg_().log_().neg_()
    return top_bits

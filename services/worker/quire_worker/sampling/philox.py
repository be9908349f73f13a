"""Philox4x32-10 (Salmon et al., SC 2011): four 32-bit random words as a pure function of a counter and a key.

Words are numpy arrays of uint64 that hold 32 bits, since their products need 64 bits.
"""

from __future__ import annotations

import numpy as np

from quire_worker.arrays import UInt64

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

Words = tuple[UInt64, UInt64, UInt64, UInt64]


def philox(counter: Words, key: tuple[UInt64, UInt64]) -> Words:
    """Compute four random words for each element by Philox4x32 with ten rounds. Counter and key words are broadcast
    together, and each is below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        # Masking what leaves a round keeps every word below 2**32.
        c0, c1 = (high >> _SHIFT) ^ c1 ^ k0, high & _MASK
        c2, c3 = (low >> _SHIFT) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def split_seed(seed: UInt64) -> tuple[UInt64, UInt64]:
    """Return the key words of 64-bit seeds: low half, high half."""
    return seed & _MASK, seed >> _SHIFT

"""The arithmetic of the made-up model, over uint64 arrays that wrap around.

    S_p = S_{p-1} + h(token_p, p)      the KV of position p: 8 bytes that depend on every token up to p and its position
    q   = probe of S_{n-1}             an earlier position, so that every page of the prefix is read now and then
    x   = mix(S_{n-1}, S_q, n, key)    the random number that decides the token at index n
    token = x scaled to the vocabulary

`key` is 0 for greedy sequences, else made of seed and sample index. A blocked token is replaced by the next token of
the same chain. If a grammar says which tokens are allowed, x is scaled to these tokens. This module knows nothing of
pages or batches. `answer` has the same arithmetic in plain integers, and tests compare the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_worker.arrays import UInt64

GREEDY_BELOW = 1e-5
MASK = (1 << 64) - 1
TOKEN_FACTOR = 0x9E3779B97F4A7C15
PLACE_FACTOR = 0xD1B54A32D192ED03
PROBE_FACTOR = 0xAEF17502108EF2D9
SAMPLE_FACTOR = 0x8CB92BA72F3D8DD7
FIRST_MIX = 0xBF58476D1CE4E5B9
SECOND_MIX = 0x94D049BB133111EB
# The number of tries. A sequence whose stop ids are nearly the whole vocabulary then gets the lowest id that is left.
RESAMPLES = 64

_TOKEN, _PLACE, _PROBE, _SAMPLE, _FIRST, _SECOND = (
    np.uint64(factor) for factor in (TOKEN_FACTOR, PLACE_FACTOR, PROBE_FACTOR, SAMPLE_FACTOR, FIRST_MIX, SECOND_MIX)
)
_32, _29 = np.uint64(32), np.uint64(29)


def contributions(token: NDArray[np.int64], place: NDArray[np.int64]) -> UInt64:
    """Return a 64-bit hash of each token together with its position. The KV of a position is the running sum of these
    hashes."""
    x = token.view(np.uint64) * _TOKEN
    x += place.view(np.uint64) * _PLACE
    x ^= x >> _29
    x *= _FIRST
    x ^= x >> _32
    return x


def probes(state: UInt64, length: NDArray[np.int64]) -> NDArray[np.int64]:
    """Choose an earlier position, 0 to length - 1, for each sequence, by the upper half of its state."""
    x = state >> _32
    x *= length.view(np.uint64)
    x >>= _32
    return x.view(np.int64)


def keys(temperature: NDArray[np.float32], seed: UInt64, sample_index: NDArray[np.uint32]) -> UInt64:
    """Return the random key of each sequence, from its seed and its sample index; 0 if the sequence is greedy."""
    key = sample_index.astype(np.uint64) * _SAMPLE
    key += seed
    key *= _FIRST
    key ^= key >> _29
    key[temperature < GREEDY_BELOW] = 0
    return key


def random_numbers(state: UInt64, probe: UInt64, length: NDArray[np.int64], key: UInt64) -> UInt64:
    """Return the random number x that decides each sequence's next token, mixed from its last state, the probed state,
    the length and the key."""
    x = probe * _PROBE
    x += state
    x += length.view(np.uint64) * _PLACE
    x += key
    return _mix(x)


def tokens_of(x: UInt64, vocab_size: int) -> NDArray[np.int32]:
    """Scale the upper half of each x to a token id, 0 to vocab_size - 1."""
    scaled = x >> _32
    scaled *= np.uint64(vocab_size)
    scaled >>= _32
    return scaled.astype(np.int32)


def token_of(x: int, vocab_size: int) -> int:
    """Scale one x, a plain integer, to a token id of the vocabulary."""
    return ((x >> 32) * vocab_size) >> 32


def mix(x: int) -> int:
    """Apply the mixing function to one plain integer."""
    x = ((x ^ (x >> 32)) * FIRST_MIX) & MASK
    x = ((x ^ (x >> 29)) * SECOND_MIX) & MASK
    return x ^ (x >> 32)


def resample(x: int, blocked: NDArray[np.bool_]) -> tuple[int, int]:
    """Mix x again until its token is not blocked. Returns x and the token; both are unchanged if the token is not
    blocked at first. After RESAMPLES tries the token is the lowest id that is not blocked, or 0 if all are. `blocked`
    has an item for each id."""
    token = token_of(x, len(blocked))
    for _ in range(RESAMPLES):
        if not blocked[token]:
            return x, token
        x = mix((x + TOKEN_FACTOR) & MASK)
        token = token_of(x, len(blocked))
    return x, int(np.argmin(blocked))


def choose(x: int, blocked: NDArray[np.bool_]) -> int:
    """Scale x to one of the tokens that are not blocked; -1 if all are. This is for rows whose grammar allows few
    tokens, which `resample` would rarely find."""
    ids = np.flatnonzero(~blocked)
    return int(ids[token_of(x, len(ids))]) if len(ids) else -1


def _mix(x: NDArray[Any]) -> UInt64:
    """Mix the bits of each x by shifts and multiplications, in place; returns the array. `mix` does the same for one
    integer."""
    x ^= x >> _32
    x *= _FIRST
    x ^= x >> _29
    x *= _SECOND
    x ^= x >> _32
    return x

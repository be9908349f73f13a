"""TokenMask: the tokens that a grammar allows at one position of a sequence. It is applied in the same way as
allowed_token_ids.

If all tokens that the grammar allows are blocked (stop ids before min_tokens), they may be sampled nevertheless. So a
complete answer ends, whatever its length.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_worker.arrays import Bool, Float32, Int32, UInt64


class MaskKind(enum.IntEnum):
    """The tokens that a grammar allows."""

    ONE = 1
    """One token, which is forced."""
    BITS = 2
    """The tokens whose bits are set."""
    END = 3
    """Only the model's eos tokens, of which there may be several: the answer is complete."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens of one position."""

    kind: MaskKind
    token: int
    """The only token, of the kind ONE."""
    bits: bytes
    """The mask of the other kinds: a bit for every token of the vocabulary, 1 if it is allowed, the lowest of a byte
    first, in whole lines of 1,024."""

    def forbidden(self, vocab_size: int) -> Bool:
        """Return bool [V]: True for each token that may not be sampled."""
        if self.kind == MaskKind.ONE:
            found = np.ones(vocab_size, np.bool_)
            found[self.token] = False
            return found
        allowed = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=vocab_size, bitorder="little")
        return np.logical_not(allowed.view(np.bool_))

    def allows(self, token: int) -> bool:
        """Whether this token may be sampled."""
        if self.kind == MaskKind.ONE:
            return token == self.token
        return bool(self.bits[token >> 3] >> (token & 7) & 1)

    def allows_only(self, ids: Int32) -> bool:
        """Whether all allowed tokens are among `ids`."""
        if self.kind == MaskKind.ONE:
            return bool((ids == self.token).any())
        left = np.logical_not(self.forbidden(8 * len(self.bits)))
        left[ids[ids < len(left)]] = False
        return not left.any()

    def restrict(self, logits: Float32) -> None:
        """Make the logits [V] of all other tokens -inf, in place."""
        logits[self.forbidden(len(logits))] = -np.inf


class MaskBuilder:
    """Builds the masks of one vocabulary from the bits of the tokens that a grammar allows."""

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        ending = bit_words(vocab_size, eos_token_ids)
        self._not_ending = ~ending
        self._ending_words = np.count_nonzero(ending)

    def build(self, allowed: UInt64) -> TokenMask | None:
        """Build the mask of the tokens whose bits are 1 in `allowed`, in the layout of `bit_words`. Its kind is END if
        all are eos tokens, ONE for a single other token, else BITS. Returns None where no token is left."""
        words = np.count_nonzero(allowed)
        if not words:
            return None
        bits = allowed.tobytes()
        if words <= self._ending_words and not np.bitwise_and(allowed, self._not_ending).any():
            return TokenMask(MaskKind.END, 0, bits)
        if words == 1:
            place = int(allowed.argmax())
            word = int(allowed[place])
            if not word & (word - 1):
                return TokenMask(MaskKind.ONE, 64 * place + word.bit_length() - 1, b"")
        return TokenMask(MaskKind.BITS, 0, bits)


def bit_words(vocab_size: int, tokens: Iterable[int]) -> UInt64:
    """Return [16 ceil(V / 1024)] a bit for every token of the vocabulary, the lowest first: 1 for these tokens."""
    bits = np.zeros(8 * mask_bytes(vocab_size), np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.uint64)


def mask_bytes(vocab_size: int) -> int:
    """The size of a mask's bits."""
    return 128 * -(-vocab_size // 1024)

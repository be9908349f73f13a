"""Tokens by slot, as they come, until their request needs them: one indexed write per step instead of one per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTH = 256


class TokenMatrix:
    """Up to `width` tokens of each slot. Knows nothing of who holds a slot."""

    def __init__(self, num_slots: int, width: int = WIDTH) -> None:
        self._width = width
        self._token: NDArray[np.int32] = np.zeros((num_slots, width), np.int32)
        # One below the other, as rows of tokens come.
        self._steps: NDArray[np.int32] = np.arange(width, dtype=np.int32)[:, None]
        # The same tokens, slot after slot; places in a row of tokens; where each slot begins.
        self._flat = self._token.reshape(-1)
        self._place: NDArray[np.intp] = np.arange(num_slots * width)
        self._begin: NDArray[np.intp] = np.arange(num_slots) * width
        # Tokens that wait, by slot.
        self.count: NDArray[np.int32] = np.zeros(num_slots, np.int32)

    @property
    def most(self) -> int:
        """Tokens of a slot that can be put at once."""
        return self._width

    def full_slots(self, slot: NDArray[np.int32], more: int | NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the slots that have no room for `more` tokens, of all or of each; call `take_tokens` for them
        first."""
        full = self.count[slot] > self._width - more
        return slot[full]

    def put_tokens(self, slot: NDArray[np.int32], token: NDArray[np.int32]) -> None:
        """Rows of tokens (step, slot) for the slots, which are distinct and have room."""
        place = self.count[slot]
        self._token[slot, place + self._steps[: len(token)]] = token
        self.count[slot] = place + len(token)

    def put_rows(self, slot: NDArray[np.int32], count: NDArray[np.int32], token: NDArray[np.int32]) -> None:
        """Rows of `count` tokens each, one row after the other, for the slots, which are distinct and have room."""
        place = self.count[slot]
        first = self._begin[slot] + place
        first -= count.cumsum() - count
        self._flat[first.repeat(count) + self._place[: len(token)]] = token
        self.count[slot] = place + count

    def take_tokens(self, slot: int) -> bytes:
        """The slot's tokens, as little-endian int32, once."""
        tokens = self._token[slot, : self.count[slot]].tobytes()
        self.count[slot] = 0
        return tokens

"""TokenMatrix: holds the new tokens of each slot until its request needs them. A step then costs one indexed write, not
one write per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTH = 256


class TokenMatrix:
    """Up to `width` tokens of each slot. It does not know which request holds a slot."""

    def __init__(self, num_slots: int, width: int = WIDTH) -> None:
        self._width = width
        self._token: NDArray[np.int32] = np.zeros((num_slots, width), np.int32)
        # The numbers 0 to width - 1 as a column, which is added to the slots' counts to place several tokens per slot.
        self._steps: NDArray[np.int32] = np.arange(width, dtype=np.int32)[:, None]
        # `_flat`: the same tokens, slot after slot. `_place`: the indices 0, 1, 2, ... `_begin`: the index in `_flat`
        # at which each slot begins.
        self._flat = self._token.reshape(-1)
        self._place: NDArray[np.intp] = np.arange(num_slots * width)
        self._begin: NDArray[np.intp] = np.arange(num_slots) * width
        # The number of tokens in each slot.
        self.count: NDArray[np.int32] = np.zeros(num_slots, np.int32)

    @property
    def most(self) -> int:
        """The most tokens of one slot that can be put at once."""
        return self._width

    def full_slots(self, slot: NDArray[np.int32], more: int | NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the slots that have no room for `more` tokens (one number for all slots, or one for each). The caller
        must call `take_tokens` for these first."""
        full = self.count[slot] > self._width - more
        return slot[full]

    def put_tokens(self, slot: NDArray[np.int32], token: NDArray[np.int32]) -> None:
        """Append rows of tokens (step, slot) to the slots, which are distinct and have room."""
        place = self.count[slot]
        self._token[slot, place + self._steps[: len(token)]] = token
        self.count[slot] = place + len(token)

    def put_rows(self, slot: NDArray[np.int32], count: NDArray[np.int32], token: NDArray[np.int32]) -> None:
        """Append `count[i]` tokens to the i-th slot; `token` has the tokens of all slots one after the other. The slots
        are distinct and have room."""
        place = self.count[slot]
        first = self._begin[slot] + place
        first -= count.cumsum() - count
        self._flat[first.repeat(count) + self._place[: len(token)]] = token
        self.count[slot] = place + count

    def take_tokens(self, slot: int) -> bytes:
        """Remove and return the slot's tokens, as little-endian int32."""
        tokens = self._token[slot, : self.count[slot]].tobytes()
        self.count[slot] = 0
        return tokens

"""Multi-turn conversations for cache benchmarks: users that share a system prompt, and send all earlier messages again
in each turn.

A seed decides which user speaks next, and the words. The answers are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """Tokens and counts."""

    users: int = 20
    turns: int = 6
    system: int = 1024
    least_message: int = 32
    most_message: int = 96
    answer: int = 64


class Conversations:
    """`turns` yields (user, prompt), one after the other. Pass the answer before the next turn is taken."""

    def __init__(self, shape: Shape, vocab: tuple[int, int], seed: int = 0) -> None:
        self._shape, self._vocab = shape, vocab
        self._rng = np.random.default_rng(seed)
        self._said = [self._words(shape.system)] * shape.users

    def turns(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the turns. Users speak in random order, equally often."""
        order = np.repeat(np.arange(self._shape.users), self._shape.turns)
        self._rng.shuffle(order)
        for user in order.tolist():
            message = self._words(int(self._rng.integers(self._shape.least_message, self._shape.most_message + 1)))
            self._said[user] = [*self._said[user], *message]
            yield user, self._said[user]

    def answered(self, user: int, tokens: list[int]) -> None:
        """Add an answer to the user's next prompt."""
        self._said[user] = [*self._said[user], *tokens]

    def _words(self, count: int) -> list[int]:
        tokens: list[int] = self._rng.integers(*self._vocab, count).tolist()
        return tokens

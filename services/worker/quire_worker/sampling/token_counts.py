"""TokenCounts: the tokens that a sequence has, and how often each occurs in its output. It only stores tokens that
occur, so it is small."""

from __future__ import annotations

import numpy as np

from quire_worker.arrays import Float32, Int32


class TokenCounts:
    """Counts of the answer's tokens: the tokens of the prompt in ascending order, then the others in the order of their
    first occurrence. Tokens that only the prompt has count 0."""

    def __init__(self, prompt_ids: Int32) -> None:
        prompt = np.unique(prompt_ids).astype(np.int64)
        self._index = {token: place for place, token in enumerate(prompt.tolist())}
        self._size = len(prompt)
        self._ids = np.concatenate([prompt, np.zeros(64, np.int64)])
        self._count = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        """Count one more token of the output."""
        place = self._index.get(token)
        if place is None:
            place = self._index[token] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(place, np.int64)])
                self._count = np.concatenate([self._count, np.zeros(place, np.float32)])
            self._ids[place] = token
            self._size += 1
        self._count[place] += 1

    def penalise(self, logits: Float32, repetition: np.float32, frequency: np.float32, presence: np.float32) -> bool:
        """Apply repetition, frequency and presence penalties to the known tokens of a row of logits [V], in place, in
        float32 and in vLLM's order. Returns False if a logit is then +inf."""
        ids, count = self._ids[: self._size], self._count[: self._size]
        values = logits[ids]
        if repetition != 1:
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / repetition, values * repetition)
        if frequency:
            values -= frequency * count
        if presence:
            values -= presence * (count > 0)
        logits[ids] = values
        return not (values == np.inf).any()

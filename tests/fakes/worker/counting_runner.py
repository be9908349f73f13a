"""A model that counts: its next token is a sum over what it finds in its pages. Readable, and a strict judge of pages.

K and V of a position are the token itself, so a page that was not filled, was filled for somebody else, or was taken
from a wrong table entry gives other tokens than `continuation` says, and a position never written raises.
"""

from __future__ import annotations

import numpy as np

from quire_common.credit import LogprobColumns
from quire_worker.step import DeviceTiming, StepBatch, StepOutput

EMPTY = -7


def next_token(tokens: np.ndarray, vocab: int, seed: int = 0) -> int:
    """The model: any change of any earlier token or place changes it."""
    places = np.arange(1, len(tokens) + 1, dtype=np.int64)
    return (int(np.dot(tokens.astype(np.int64) + 3, places * 2654435761 % 1000003)) + seed * 7919) % vocab


def continuation(prompt: list[int], count: int, vocab: int, seed: int = 0) -> list[int]:
    """What the model says after a prompt, nothing blocked."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(np.array(tokens), vocab, seed))
    return tokens[len(prompt) :]


class CountingRunner:
    """`poison`: a token that makes the runner raise. `nan`: a token whose row yields -1. `batches` keeps what ran."""

    def __init__(self, num_pages: int, page_size: int, vocab: int, poison: int = -1, nan: int = -1) -> None:
        self.pages = np.full((num_pages, page_size), EMPTY, np.int32)
        self.page_bytes = page_size * 4
        self.vocab = vocab
        self.poison = poison
        self.nan = nan
        self.broken = False
        self.batches: list[StepBatch] = []

    def run(self, batch: StepBatch) -> StepOutput:
        if self.broken:
            raise RuntimeError("the device is gone")
        assert batch.token.dtype == np.int64 and len(batch.token) == batch.count.sum()
        self.batches.append(batch)
        tokens, first = [], 0
        for s, count in enumerate(batch.count.tolist()):
            row = batch.token[first : first + count]
            first += count
            if self.poison in row:
                raise ValueError(f"poisoned by {self.poison}")
            seen = self._attend(row, int(batch.position[s]), batch.page_table[s])
            drafts = int(batch.drafts[s]) if len(batch.drafts) else 0
            for behind in range(drafts, -1, -1) if batch.sample[s] else ():
                known = seen[: len(seen) - behind]
                tokens.append(self._draw(batch, s, known, nan=self.nan in row[: count - behind]))
        token = np.array(tokens, np.int32)
        return StepOutput(token, _logprobs(batch, token), DeviceTiming(1, 2, 3))

    def read_page(self, page: int, /) -> bytes:
        return bytes(self.pages[page].data)

    def write_page(self, page: int, data: bytes | memoryview, /) -> None:
        self.pages[page] = np.frombuffer(data, np.int32)

    def _attend(self, row: np.ndarray, position: int, table: np.ndarray) -> np.ndarray:
        size = self.pages.shape[1]
        places = np.arange(position + len(row))
        assert (table[places // size] > 0).all(), "a position without a page"
        mine = places[position:]
        self.pages[table[mine // size], mine % size] = row
        seen: np.ndarray = self.pages[table[places // size], places % size]
        if (seen == EMPTY).any():
            raise RuntimeError(f"positions {np.flatnonzero(seen == EMPTY)} were never computed")
        return seen

    def _draw(self, batch: StepBatch, s: int, seen: np.ndarray, nan: bool) -> int:
        if nan:
            return -1
        token = next_token(seen, self.vocab, int(batch.params["seed"][s]))
        while token in batch.blocked.get(s, ()):
            token = (token + 1) % self.vocab
        return token


def _logprobs(batch: StepBatch, token: np.ndarray) -> LogprobColumns | None:
    samples = 1 + batch.drafts if len(batch.drafts) else np.ones(len(batch.count), np.int32)
    asked = np.repeat(batch.logprobs, samples * batch.sample)
    index = np.flatnonzero(asked >= 0).astype(np.int32)
    if not len(index):
        return None
    tops = asked[index].astype(np.int32)
    return LogprobColumns(
        token_index=index,
        logprob=-(token[index].astype(np.float32)),
        rank=np.ones(len(index), np.int32),
        top_count=tops,
        top_id=np.repeat(token[index], tops).astype(np.int32),
        top_logprob=np.zeros(int(tops.sum()), np.float32),
    )

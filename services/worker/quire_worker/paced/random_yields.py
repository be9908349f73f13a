"""RandomYields: makes rows of the paced worker yield no token, one token or several tokens at random. The answers of
the model stay the same.

Tests use it to check code that counts tokens. The model itself proposes the drafts, and a random part of them is
replaced with wrong tokens. Some sequences are held at random. The sampled tokens depend on neither.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire_worker.engine.step_builder import select_sequences

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_worker.arrays import Bool, Int32, Int64
    from quire_worker.engine.ports import Runner
    from quire_worker.step import StepBatch


@dataclass(frozen=True, slots=True)
class Odds:
    """Probabilities for each row in each step."""

    held: float = 0.2
    wrong: float = 0.25
    """The probability that a draft is a random token, which may be the model's own by chance."""


class RandomYields:
    """Implements Drafter and RowGate. `runner` uses the same pages as the runner of the steps, which later writes the
    same KV again. `runner` must take no time. Belongs to the thread that runs steps."""

    constrained_only = False

    def __init__(self, runner: Runner, vocab_size: int, seed: int, odds: Odds = Odds()) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._odds = odds
        self._rng = np.random.default_rng(seed)

    def propose(self, batch: StepBatch) -> Int32:
        """Return drafts [S, most drafts of a sequence]: the model's own next tokens, some of them replaced with random
        tokens. After such a token, the next drafts are the tokens that the model would sample after it. The runner
        computes each, and writes its KV to the pages. Places without a draft hold 0."""
        proposed = np.zeros((len(batch.drafts), int(batch.drafts.max(initial=0))), np.int32)
        first = np.cumsum(batch.count) - batch.count
        token, position = batch.token[first].copy(), batch.position.copy()
        for nth in range(proposed.shape[1]):
            drafting = np.flatnonzero(batch.drafts > nth)
            sampled = self._runner.run(_one_row_each(batch, drafting, token[drafting], position[drafting])).token
            wrong = self._rng.random(len(drafting)) < self._odds.wrong
            other = self._rng.integers(0, self._vocab_size, len(drafting))
            proposed[drafting, nth] = token[drafting] = np.where(wrong, other, np.maximum(sampled, 0))
            position[drafting] += 1
        return proposed

    def held(self, batch: StepBatch) -> Bool:
        """Return a random choice of sequences to hold."""
        held: Bool = self._rng.random(len(batch.count)) < self._odds.held
        return held


def _one_row_each(batch: StepBatch, sequences: NDArray[np.intp], token: Int64, position: Int32) -> StepBatch:
    """Return a step in which each of these sequences has one token at one position, and samples the next token. It has
    no drafts, logprobs, controls or grammars; blocked ids stay."""
    chosen = select_sequences(batch, sequences.tolist())
    return dataclasses.replace(
        chosen,
        token=token,
        count=np.ones(len(sequences), np.int32),
        position=position,
        drafts=np.empty(0, np.int32),
        logprobs=np.full(len(sequences), -1, np.int32),
        controls={},
        constraints={},
        scores={},
    )

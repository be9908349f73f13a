"""Sequences that ask something of their logits, as the device and as the CPU have them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_common.thinking import ThinkingBudget
from quire_worker.cuda.logits_states import LogitsStates
from quire_worker.ops.triton.controls import ControlColumns, change_logits
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.param_rows import param_rows
from quire_worker.step import StepBatch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
VOCAB, SLOTS = 1500, 8
ALPHABET = 12
"""Sequences are of few tokens, so that words and counts meet."""


def some_controls(rng: np.random.Generator) -> LogitControls:
    """Each part is asked in about half of the cases."""

    def words(count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rng.integers(0, ALPHABET, rng.integers(1, 4)).tolist()) for _ in range(count))

    half = (rng.random(6) < 0.5).tolist()
    biased = np.unique(rng.integers(0, 300, 5)).tolist()
    found = LogitControls(
        presence_penalty=0.75 if half[0] else 0.0,
        frequency_penalty=-0.3 if half[1] else 0.0,
        repetition_penalty=1.7 if half[2] else 1.0,
        logit_bias=tuple((token, float(rng.normal(0, 5))) for token in biased) if half[3] else (),
        allowed_token_ids=tuple(range(0, VOCAB, 3)) if half[4] else (),
        bad_words=words(300 if rng.random() < 0.2 else 6) if half[5] else (),
    )
    return found if found != LogitControls() else LogitControls(presence_penalty=1.0)


def some_thinking(rng: np.random.Generator) -> ThinkingBudget | None:
    """Of so few tokens that sequences begin and end to think all the time."""
    start, end = (tuple(rng.integers(0, 3, rng.integers(1, 4)).tolist()) for _ in range(2))
    return ThinkingBudget(start, end, int(rng.integers(0, 5))) if rng.random() < 0.5 else None


class Rows:
    """Sequences in slots, on both sides: `logits` of the CPU's rows are changed by RowControls, the device's by us."""

    def __init__(self, controls: list[LogitControls | None], seed: int, max_tokens: int = 40) -> None:
        self.rng = np.random.default_rng(seed)
        self.slot = self.rng.permutation(SLOTS)[: len(controls)].astype(np.int32)
        self.rows: dict[int, LogitsState] = {}
        for row, each in enumerate(controls):
            ids = [self.rng.integers(0, ALPHABET, n).astype(np.int32) for n in (9, int(self.rng.integers(0, 7)))]
            if each is not None:
                thinking = some_thinking(self.rng)
                sequence = Sequence(ids[0], Stop(max_tokens), Sampling(controls=each), ids[1], thinking=thinking)
                self.rows[row] = LogitsState(sequence)
        self.states = LogitsStates(DEVICE, VOCAB)
        self.last = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        self.blocked = np.zeros(len(controls), np.int32)
        self.stop_id = np.full((len(controls), 2), -1, np.int32)

    def batch(self, fed: bool) -> StepBatch:
        n = len(self.slot)
        zeros = np.zeros(n, np.int32)
        return StepBatch(
            np.zeros(n, np.int64), zeros + 1, zeros, zeros[:, None], np.ones(n, np.bool_), param_rows(n), zeros - 1,
            controls=self.rows, slot=self.slot, fed=np.full(n, fed), last=np.zeros(n, np.bool_),
        )  # fmt: skip  # mostly neutral columns

    def feed(self, token: np.ndarray) -> None:
        """Tokens that were drawn, by row."""
        for row, controls in self.rows.items():
            controls.fed(int(token[row]))
            self.last[int(self.slot[row])] = int(token[row])

    def addresses(self, fed: bool) -> Tensor:
        found = np.zeros(len(self.slot), np.int64)
        for row, address in self.states.addresses(self.batch(fed)).items():
            found[row] = address
        return torch.from_numpy(found).to(DEVICE)

    def changed(self, logits: Tensor, fed: bool) -> tuple[Tensor, Tensor]:
        n = len(self.slot)
        address = self.addresses(fed)
        columns = ControlColumns(
            address=address,
            first_row=torch.arange(n, dtype=torch.int32, device=DEVICE),
            fed=torch.full((n,), int(fed), dtype=torch.int32, device=DEVICE),
            slot=torch.from_numpy(self.slot).to(DEVICE),
            blocked=torch.from_numpy(self.blocked).to(DEVICE),
            stop_id=torch.from_numpy(self.stop_id).to(DEVICE),
        )
        return address, change_logits(logits.to(DEVICE), columns, self.last)

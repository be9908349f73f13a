"""StepBatches: random batches that nearly fill a step's size, of sequences that have a past. Knows no device."""

from __future__ import annotations

import numpy as np

from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.arrays import Int32, Int64
from quire_worker.cuda.step_size import MOST_PADDED_ROWS, StepSize
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.ops.triton.fresh_attention import LEAST_TOKENS
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.param_rows import param_rows
from quire_worker.sampling.token_mask import MaskKind, TokenMask, mask_bytes
from quire_worker.step import StepBatch
from tests.gpu.ring_row import RingRow

_CONTROLS = LogitControls(presence_penalty=1.5, repetition_penalty=1.2, logit_bias=((7, 4.0),), bad_words=((9,),))
_CHUNKS, _MANY_CHUNKS = 4, 8
_CONTROLLED = 64
"""Rows at most: each has a sheet to be made and uploaded."""
MASK_SLOTS = 2 * _CONTROLLED
_FAR = 1 << 30


class StepBatches:
    """For a model of such a vocabulary and such pages, on engines of so many slots. `ring`: where masks go, if steps
    have some."""

    def __init__(
        self, vocab_size: int, page_size: int, num_pages: int, num_slots: int, ring: MaskRing | None = None
    ) -> None:
        self._ring = ring
        self._vocab_size = vocab_size
        self._page_size = page_size
        self._num_pages = num_pages
        self._num_slots = num_slots
        self._rng = np.random.default_rng(1)

    def make(self, size: StepSize, drawn: list[Int64], *, fresh: bool = False) -> StepBatch:
        """`drawn`: the token that each device drew last in each slot. Rows that decode compute it, and so have slots
        in which all devices agree. `fresh`: long chunks have no past."""
        rng = self._rng
        decodes = max(0, size.decodes - int(rng.integers(0, 2))) if size.decodes > 2 else size.decodes
        count = self._counts(size, decodes)
        rows = len(count)
        position = rng.integers(0, 3 * self._page_size, rows).astype(np.int32)
        # Full steps have graphs where no prompt is fresh.
        position[: rows if size.rows > MOST_PADDED_ROWS else decodes] += 1
        position[fresh & (count >= LEAST_TOKENS)] = 0
        agree = np.all([each == drawn[0] for each in drawn], axis=0)
        slot = np.argsort(~agree, kind="stable")[:rows].astype(np.int32)
        if not agree[slot[:decodes]].all():
            raise RuntimeError("devices agree in too few slots to go on")
        token = rng.integers(0, self._vocab_size, int(count.sum()))
        token[:decodes] = drawn[0][slot[:decodes]]
        asks = rng.random(rows) < 0.5
        asks[0] = True
        controls: dict[int, LogitsState] = {}
        if size.controlled:
            ids = token[-8:].astype(np.int32)
            for row in range(0, rows, max(2, rows // _CONTROLLED)):
                controls[row] = LogitsState(Sequence(ids, Stop(50), Sampling(controls=_CONTROLS)))
        return StepBatch(
            token=token,
            count=count,
            position=position,
            page_table=self._table(-(-(position + count) // self._page_size)),
            sample=np.ones(rows, np.bool_),
            params=param_rows(
                rows,
                temperature=np.where(asks & size.filtered, 1.0, 0.0),
                top_k=np.where(asks & size.filtered, 5, 0),
                seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
            ),
            logprobs=np.zeros(rows, np.int32),
            controls=controls,
            constraints=self._constraints(position + count) if size.masked else {},
            bound=np.full(rows, _FAR, np.int32),
            min_len=np.zeros(rows, np.int32),
            slot=slot,
            fed=np.arange(rows) < decodes,
            last=np.zeros(rows, np.bool_),
            stop_id=np.full((rows, 2), -1, np.int32),
        )

    def _constraints(self, sample_position: Int32) -> dict[int, RingRow]:
        """Grammars of some rows, each of which allows half of all tokens."""
        if self._ring is None:
            raise RuntimeError("there is no ring for masks")
        rows, rng, found = len(sample_position), self._rng, dict[int, RingRow]()
        for row in range(0, rows, max(2, rows // _CONTROLLED)):
            found[row] = RingRow(self._ring, len(found))
            bits = np.packbits(rng.random(self._vocab_size) < 0.5, bitorder="little").tobytes()
            mask = TokenMask(MaskKind.BITS, 0, bits.ljust(mask_bytes(self._vocab_size), b"\0"))
            found[row].put(int(sample_position[row]), mask)
        return found

    def _counts(self, size: StepSize, decodes: int) -> Int32:
        """One for each that decodes, then the chunks', which fill the size's rows."""
        rng = self._rng
        most = _MANY_CHUNKS if size.rows > MOST_PADDED_ROWS else _CHUNKS
        chunks = min(size.chunks, size.rows, int(rng.integers(1, most + 1))) if size.rows else 0
        cut: Int64 = np.empty(0, np.int64)
        if chunks > 1:
            cut = np.sort(rng.choice(np.arange(1, size.rows), chunks - 1, replace=False))
        parts = np.diff([0, *cut, size.rows])[: max(chunks, 0)]
        return np.concatenate([np.ones(decodes, np.int32), parts]).astype(np.int32)

    def _table(self, need: Int32) -> Int32:
        """Pages at random, each of one sequence."""
        pages = self._rng.permutation(np.arange(1, self._num_pages)).astype(np.int32)
        table: Int32 = np.zeros((len(need), int(need.max())), np.int32)
        at = 0
        for row, pages_needed in enumerate(need.tolist()):
            table[row, :pages_needed] = pages[at : at + pages_needed]
            at += pages_needed
        return table

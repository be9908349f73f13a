"""StepBatch and StepOutput: the engine's input to the model runner for one step, and the runner's result.

Both are numpy columns of one step. This file knows nothing of slots, grants, owners of pages or text: the engine has
already decided which sequences run, over which positions and on which pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_worker.arrays import Bool, Int32, Int64

if TYPE_CHECKING:
    from quire_common.credit import LogprobColumns
    from quire_worker.matcher.row_constraint import RowConstraint
    from quire_worker.sampling.logits_state import LogitsState
    from quire_worker.sampling.param_rows import ParamRows

# In a token's place, where a draw has none: the row's logits hold a NaN; its request's own parameters leave nothing to
# draw; a GPU holds the row, since its mask was not there.
DAMAGED = -1
NOTHING_LEFT = -2
HELD = -3


def _no_ids() -> Int32:
    return np.empty(0, np.int32)


def _no_flags() -> Bool:
    return np.empty(0, np.bool_)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Prompt tokens whose logprobs are wanted: those that follow a chunk's rows, from its first row on."""

    token: Int32
    """[T] the tokens, T at most the chunk's rows."""
    wanted: int
    """Number of alternatives of each."""


@dataclass(slots=True)
class StepBatch:
    """One step: S sequences that run R rows (tokens) in all. The runner reads it and changes nothing.

    A row's absolute position p is its sequence's `position` plus its index within the sequence. Its K and V are written
    to `page_table[s, p // page_size]` at `p % page_size`, and it attends to positions 0..p of the same table, so pages
    before `position` must be ready. Pages are of KV group 0 (full attention). The new token's absolute index,
    `position + count`, is the random position, so a draw survives preemption and migration.
    """

    token: Int64
    """[R] token ids, sequence after sequence."""
    count: Int32
    """[S] rows of each sequence, at least 1 each; they add up to R."""
    position: Int32
    """[S] absolute position of each sequence's first row."""
    page_table: Int32
    """[S, P] page indices; P covers the longest sequence of the step; unused entries are 0, the dummy page."""
    sample: Bool
    """[S] whether the sequence's last row yields a token. False for a prefill chunk that is not the prompt's last."""
    params: ParamRows
    """[S] how each sequence's token is drawn: see sampling/draw_rows.py."""
    logprobs: Int32
    """[S] number of alternatives to report for the sampled token; -1: none; 0: the chosen token only."""
    blocked: Mapping[int, Int32] = field(default_factory=dict)
    """Sequence index -> token ids that may not be drawn at this step (stop ids before min_tokens is reached). Logprobs,
    which are of the raw logits, do not see it."""
    controls: Mapping[int, LogitsState] = field(default_factory=dict)
    """Sequence index -> what else its request asked of the logits, of sequences that draw. Logprobs do not see it."""
    constraints: Mapping[int, RowConstraint] = field(default_factory=dict)
    """Sequence index -> its grammar, of sequences that draw. The runner asks for the mask of a token as late as it can,
    just before it draws, and never waits: without a mask it says in its output that the sequence is held."""
    scores: Mapping[int, PromptScores] = field(default_factory=dict)
    """Sequence index -> logprobs wanted of its prompt."""
    drafts: Int32 = field(default_factory=_no_ids)
    """[S] how many of a sequence's last rows are drafts: tokens that somebody proposes to come next. A sequence that
    samples then yields a token for each of its last 1 + drafts rows, and the others are as if no draft were there.
    Empty: nobody has drafts. Sequences with `blocked` tokens, a grammar, or logits that change with their tokens have
    none."""
    formed_ns: int = 0
    """`time.monotonic_ns()` when the engine formed it, 0: unknown. A device that queues steps knows by it whether it
    stood idle before this one."""
    slot: Int32 = field(default_factory=_no_ids)
    """[S] the sequence's slot. This column and those below are for the device around the runner, which feeds back what
    was drawn and checks stops: a batch that goes to a Runner directly may leave them out, and a Runner does not read
    them."""
    fed: Bool = field(default_factory=_no_flags)
    """[S] the sequence decodes: its first token is the last that was drawn in its slot, and stands at the position
    behind those that were. The device knows both: `token` holds 0, as it does for drafts, and `position` the greatest
    that is possible, given what steps in flight may draw."""
    last: Bool = field(default_factory=_no_flags)
    """[S] the sequence ends with this step's first draw, whatever it is: by length, or at its limit where nothing is
    drawn."""
    bound: Int32 = field(default_factory=_no_ids)
    """[S] with so many positions computed the sequence ends whatever is drawn."""
    min_len: Int32 = field(default_factory=_no_ids)
    """[S] stop ids may not be drawn as tokens with a lower index."""
    stop_id: Int32 = field(default_factory=_no_ids)
    """[S, I] ids that end the sequence when drawn; unused entries are -1."""

    def resolve(self, blocked: Mapping[int, Int32], last: Bool) -> None:
        """Replace what was made for the greatest possible positions, by a device that knows the right ones."""
        self.blocked, self.last = blocked, last


class StepSamples(NamedTuple):
    """The places in a step at which tokens are sampled: sequence after sequence, with the drafts of each in order."""

    sequence: Int64
    nth: Int64
    """0: the draw that follows the sequence's last known token; i: the one that follows its draft i."""
    row: Int64
    """Rows whose logits are drawn from."""
    sample_position: Int64
    """Absolute index of the drawn token."""


def samples_of(batch: StepBatch) -> StepSamples:
    """All draws of a step."""
    sequence = np.flatnonzero(batch.sample)
    row = np.cumsum(batch.count, dtype=np.int64)[sequence] - 1
    sample_position = (batch.position[sequence] + batch.count[sequence]).astype(np.int64)
    if not len(batch.drafts):
        return StepSamples(sequence, np.zeros(len(sequence), np.int64), row, sample_position)
    drafts = batch.drafts[sequence]
    samples = 1 + drafts
    nth = np.arange(int(samples.sum())) - (np.cumsum(samples) - samples).repeat(samples)
    back = drafts.repeat(samples) - nth
    return StepSamples(
        sequence.repeat(samples), nth, row.repeat(samples) - back, sample_position.repeat(samples) - back
    )


@dataclass(frozen=True, slots=True)
class DeviceTiming:
    """The time of a step's parts, in microseconds."""

    prepare_us: int
    forward_us: int
    sample_us: int


@dataclass(slots=True)
class StepOutput:
    """The result of one step."""

    token: Int32
    """[number of draws: of each sequence with `sample`, 1 + its drafts], in their order. DAMAGED where the row's logits
    hold a NaN (damaged weights or KV), NOTHING_LEFT where its request's own parameters leave nothing to draw: a
    sequence that keeps such a draw must end with an error; the others are unharmed."""
    logprobs: LogprobColumns | None
    """Logprobs of the draws; None when no sampled sequence asked."""
    timing: DeviceTiming
    scores: Mapping[int, LogprobColumns] = field(default_factory=dict)
    """Sequence index -> logprobs of its PromptScores' tokens; `token_index` counts these."""
    held: tuple[int, ...] = ()
    """Sequences whose mask was not there: what was drawn for them counts for nothing."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """Work of one step: tokens computed, of these those of prefill, tokens sampled, pairs of a token and one that it
    attends to, and tokens whose keys and values are read. Sliding windows are not taken off."""

    tokens: int
    prefill_tokens: int
    sampled: int
    pairs: int
    context: int

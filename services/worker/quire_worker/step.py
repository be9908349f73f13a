"""StepBatch and StepOutput: the engine's input to the model runner for one step, and the runner's result.

Both are numpy columns of one step. This file knows nothing of slots, grants, owners of pages or text: the engine has
already decided which sequences run, over which positions and on which pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.errors import Internal, QuireError
from quire_worker.arrays import Bool, Int32, Int64

if TYPE_CHECKING:
    from quire_common.credit import LogprobColumns
    from quire_worker.matcher.row_constraint import RowConstraint
    from quire_worker.sampling.logits_state import LogitsState
    from quire_worker.sampling.param_rows import ParamRows

# Values that StepOutput.token has in place of a token. DAMAGED: the row's logits hold a NaN. NOTHING_LEFT: the
# request's own parameters leave no token to sample. HELD: the mask of the row's grammar was not there.
DAMAGED = -1
NOTHING_LEFT = -2
HELD = -3


def nan_logits() -> QuireError:
    """Return the error NAN_LOGITS of a sequence whose logits are no numbers."""
    return Internal(
        "NAN_LOGITS",
        "The model's output for this sequence is not a number: its weights or its KV cache are damaged.",
        "Retry; if it happens again, check the weights.",
    )


def _no_ids() -> Int32:
    return np.empty(0, np.int32)


def _no_flags() -> Bool:
    return np.empty(0, np.bool_)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Prompt tokens whose logprobs a sequence wants. They are the tokens that follow the rows of its chunk, beginning
    with the token after the first row."""

    token: Int32
    """[T] the tokens. T is at most the number of rows of the chunk."""
    wanted: int
    """The number of most likely tokens that are wanted at each place, among which the token itself may be."""


@dataclass(slots=True)
class StepBatch:
    """One step: S sequences that run R rows (tokens) in all. The runner reads this record and changes nothing in it.

    The absolute position p of a row is the `position` of its sequence plus the row's index within the sequence. The
    row's key and value are written to `page_table[s, p // page_size]` at `p % page_size`. The row attends to positions
    0..p of the same table, so pages before `position` must be ready. Pages are of KV group 0 (full attention). The
    absolute index of the new token, `position + count`, is also its random position. So a sampled token stays the same
    after preemption and migration.
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
    """[S] the sampling parameters of each sequence; see sampling/param_rows.py."""
    logprobs: Int32
    """[S] number of most likely tokens to report beside the sampled one, which may be among them; 0: the sampled token
    only; -1: no logprobs."""
    blocked: Mapping[int, Int32] = field(default_factory=dict)
    """Sequence index -> token ids that may not be sampled at this step (stop ids before min_tokens is reached).
    Logprobs are of the raw logits, so `blocked` does not change them."""
    controls: Mapping[int, LogitsState] = field(default_factory=dict)
    """Sequence index -> the other changes of logits that its request asks for, for sequences that sample. They do not
    change logprobs."""
    constraints: Mapping[int, RowConstraint] = field(default_factory=dict)
    """Sequence index -> its grammar, for sequences that sample. The runner fetches the mask of a token as late as it
    can, just before it samples, and never waits. If the first mask of a sequence is missing, the runner reports the
    sequence as held."""
    scores: Mapping[int, PromptScores] = field(default_factory=dict)
    """Sequence index -> logprobs wanted of its prompt."""
    drafts: Int32 = field(default_factory=_no_ids)
    """[S] how many of a sequence's last rows are drafts: tokens that a drafter proposes as the next ones. A sequence
    that samples then yields a token for each of its last 1 + drafts rows; drafts do not change the results of the other
    rows. Empty: no sequence has drafts. Sequences with `blocked` tokens, or logits that change with their tokens, have
    none."""
    formed_ns: int = 0
    """`time.monotonic_ns()` when the engine formed the step, 0: unknown. A device that queues steps uses it to tell
    whether it was idle before this step."""
    slot: Int32 = field(default_factory=_no_ids)
    """[S] the sequence's slot. This column and those below are for the device around the runner, which feeds sampled
    tokens back and checks stops. A batch that goes to a Runner directly may leave them out, since a Runner does not
    read them."""
    fed: Bool = field(default_factory=_no_flags)
    """[S] whether the sequence decodes: its first token is the last one that was sampled in its slot, and follows the
    known positions. The device knows this token and its position. `token` holds 0, as it does for drafts, and
    `position` holds the greatest possible position, given what steps in flight may sample."""
    last: Bool = field(default_factory=_no_flags)
    """[S] whether the sequence ends with the first token of this step, whatever it is: by its length, or because it
    reaches its limit at a step that samples nothing."""
    bound: Int32 = field(default_factory=_no_ids)
    """[S] the number of computed positions at which the sequence ends, whatever it samples."""
    min_len: Int32 = field(default_factory=_no_ids)
    """[S] stop ids may not be sampled as tokens with a lower index than this."""
    stop_id: Int32 = field(default_factory=_no_ids)
    """[S, I] ids that end the sequence when they are sampled; unused entries are -1."""

    def resolve(self, blocked: Mapping[int, Int32], last: Bool) -> None:
        """Replace `blocked` and `last`, which were made for the greatest possible positions. A device that knows the
        true positions calls this."""
        self.blocked, self.last = blocked, last

    def put_drafts(self, proposed: Int32) -> None:
        """Write proposed drafts [S, max(drafts)] into the draft rows of each sequence. A sequence's drafts end before
        its first -1, and its draft rows without a draft are removed. Columns that change are replaced, and the old
        arrays stay as they are. `drafts` becomes empty if no sequence has a draft."""
        if len(self.token) == len(self.count) + int(self.drafts.sum()) and not (proposed[:, 0] >= 0).any():
            # The usual case, made fast: each sequence has one known token, and gets no draft.
            self.token = self.token[self.count.cumsum() - self.count]
            self.count, self.drafts = np.ones_like(self.count), _no_ids()
            return
        nth = np.arange(proposed.shape[1])
        is_draft = (proposed >= 0) & (nth < self.drafts[:, None])
        drafts = np.logical_and.accumulate(is_draft, axis=1).sum(axis=1, dtype=np.int32)
        known = self.count - self.drafts
        count = known + drafts
        row = np.arange(int(count.sum())) - (count.cumsum() - count).repeat(count)
        token = self.token[(self.count.cumsum() - self.count).repeat(count) + row]
        behind = row - known.repeat(count)
        chosen = behind >= 0
        token[chosen] = proposed[np.arange(len(count)).repeat(count)[chosen], behind[chosen]]
        self.token, self.count, self.drafts = token, count, drafts if drafts.any() else _no_ids()


class StepSamples(NamedTuple):
    """The places in a step at which tokens are sampled: sequence by sequence, and within a sequence in the order of its
    drafts."""

    sequence: Int64
    nth: Int64
    """0: the sample that follows the sequence's last known token; i: the sample that follows draft i."""
    row: Int64
    """The row whose logits each sample uses."""
    sample_position: Int64
    """The absolute index of the sampled token."""


def samples_of(batch: StepBatch) -> StepSamples:
    """Return the places of all samples of a step. A sequence with `sample` has one at its last row or, with drafts, one
    at each of its last 1 + drafts rows."""
    sequence = batch.sample.nonzero()[0]
    row = batch.count.cumsum(dtype=np.int64)[sequence] - 1
    sample_position = (batch.position[sequence] + batch.count[sequence]).astype(np.int64)
    if not len(batch.drafts):
        return StepSamples(sequence, np.zeros(len(sequence), np.int64), row, sample_position)
    drafts = batch.drafts[sequence]
    samples = 1 + drafts
    nth = np.arange(int(samples.sum())) - (samples.cumsum() - samples).repeat(samples)
    back = drafts.repeat(samples) - nth
    return StepSamples(
        sequence.repeat(samples), nth, row.repeat(samples) - back, sample_position.repeat(samples) - back
    )


@dataclass(frozen=True, slots=True)
class DeviceTiming:
    """The times of a step's parts, in microseconds."""

    prepare_us: int
    forward_us: int
    sample_us: int


@dataclass(slots=True)
class StepOutput:
    """The result of one step."""

    token: Int32
    """[number of samples] in the order of StepSamples: 1 + drafts for each sequence with `sample`. DAMAGED where the
    row's largest logit is NaN or infinite (damaged weights or KV), NOTHING_LEFT where the request's own parameters, its
    grammar included, leave no token, HELD where a sample that follows a draft lacks its mask. A sequence that keeps one
    of the first two must end with an error; other sequences are unharmed."""
    logprobs: LogprobColumns | None
    """Logprobs of the samples; None if no sampled sequence asked for them."""
    timing: DeviceTiming
    scores: Mapping[int, LogprobColumns] = field(default_factory=dict)
    """Sequence index -> logprobs of the tokens in its PromptScores; `token_index` is an index into these tokens."""
    held: tuple[int, ...] = ()
    """Sequences whose mask was not there. Tokens that were sampled for them must be ignored."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """The work of one step: the number of computed tokens, how many of them are prefill, the number of sampled tokens,
    the number of pairs of a token and a token that it attends to, and the number of tokens whose keys and values are
    read. Sliding windows do not reduce these numbers."""

    tokens: int
    prefill_tokens: int
    sampled: int
    pairs: int
    context: int

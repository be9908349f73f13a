"""What the engine needs of others, as Protocols: a device and the model runner in it, a page pool, an observer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from quire_common.credit import Finish, LogprobColumns, MoveKind, StepTiming
    from quire_common.errors import QuireError
    from quire_common.sequence import RequestContext, Sequence
    from quire_worker import step
    from quire_worker.arrays import Bool, Int32
    from quire_worker.matcher.row_constraint import RowConstraint
    from quire_worker.step import StepBatch, StepOutput, StepSize


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step, in columns by sequence of its batch."""

    token: Int32
    """[S, W] the sampled tokens that each sequence keeps, from the left, then -1. W is 1 if no sequence has drafts. A
    sequence that samples, but has no token, no finish and no failure, was held: the step has no effect on it."""
    finish: NDArray[np.uint8]
    """Finish; ERROR for those in `failed`."""
    failed: dict[int, QuireError]
    logprobs: LogprobColumns | None
    """`token_index` is the place in `token`, row after row."""
    timing: step.DeviceTiming
    wait_us: int
    """How long the device had nothing to do before."""
    scores: Mapping[int, LogprobColumns] = field(default_factory=dict)
    """Sequence -> logprobs of its prompt's tokens."""
    one_token_each: bool = False
    """Each sequence keeps exactly one token. The device has checked this, so the engine need not."""
    held: tuple[int, ...] = ()
    """Sequences that were held for want of a mask."""


class Device(Protocol):
    """Runs steps in the order of launch, beside the model thread, from which alone it is called."""

    wake: Callable[[], None]
    """Set by the run loop; called, from whatever thread, when a step has ended."""

    def launch(self, batch: StepBatch) -> None:
        """Take a step on and return at once. The batch is the device's from now on: it writes the tokens that are fed
        back into `token`. The engine keeps at most its `depth` of steps in flight."""

    def prepare(self) -> bool:
        """Do some of the work put off at the start (graphs), for at most some tens of milliseconds; returns whether
        some is left. Called while nothing is in flight and nothing came in."""

    def take_outcomes(self) -> list[StepOutcome]:
        """Steps that ended since the last call, in order of launch, each once. Never blocks. Raises DEVICE_BROKEN, as
        does `drain`, where the device failed by itself: nothing can run on it any more."""

    def drain(self) -> None:
        """Wait until nothing runs, and forget the outcomes: when this returns, no step writes to a page any more.
        Raises DEVICE_HUNG where a step does not end within the device's patience: nothing can run on it any more."""

    def close(self) -> None:
        """Release everything; a step that hangs is left to itself."""


class Runner(Protocol):
    """The model. Called from the device's thread alone; every `token` is resolved."""

    def run(self, batch: StepBatch) -> StepOutput:
        """Compute one step; see step.py for shapes. May raise: the device then looks for the row that is to blame, by
        running the step's sequences one at a time, so running the same positions twice must give the same."""


class Drafter(Protocol):
    """Proposes draft tokens for speculative decoding. The device keeps a draft only if the model samples the same
    token, so a wrong draft costs only time. Called from the device's thread, before a step."""

    def propose(self, batch: StepBatch) -> Int32:
        """[S, max(batch.drafts)] token ids; of each sequence, the first `drafts` ids count. The batch has its final
        tokens and positions, except for the drafts."""


class GrammarMatcher(Protocol):
    """Applies the grammars of sequences. Called from the model thread. Its process may be lost and start again:
    sequences then wait, and continue with the same tokens."""

    wake: Callable[[], None]
    """Set by the run loop. The matcher calls it from any thread when `poll` has something to do."""

    def open_sequence(self, sequence: Sequence, grammar: str) -> RowConstraint:
        """Start to apply a grammar to a sequence. Returns at once."""

    def close_sequence(self, constraint: RowConstraint) -> None:
        """End a sequence that has left its slot."""

    def poll(self) -> bool:
        """Process the matcher's messages. Returns whether `is_ready` or `failure` of a sequence may have changed since
        the last call."""

    def hold(self, constraint: RowConstraint) -> None:
        """Mark a sequence as not ready until its mask is there, since a step found it missing."""


class RowGate(Protocol):
    """Holds sequences back: a step has no effect on a held sequence. Called from the device's thread, for each step."""

    def held(self, batch: StepBatch) -> Bool:
        """[S] whether a sequence that would sample is held."""


class PageBytes(Protocol):
    """The device's pages as bytes, for moves. Called from the model thread, on pages that no step writes."""

    page_bytes: int

    def read_page(self, page: int, /) -> bytes | memoryview:
        """All layers of one page, in the layout that the model declares; may be a view of the live page."""

    def write_page(self, page: int, data: bytes | memoryview, /) -> None:
        """Overwrite a page with `data`, exactly `page_bytes` in the same layout."""


@dataclass(frozen=True, slots=True)
class SlotTrace:
    """What there is to tell of a sequence that left its slot. Times are `time.time_ns()`; 0: did not happen."""

    context: RequestContext
    started_ns: int
    first_token_ns: int
    ended_ns: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish: Finish | None
    """None: the scheduler stopped it."""


class Observer(Protocol):
    """Metrics and traces. Called from the model thread: must not block."""

    def step_done(self, timing: StepTiming, size: StepSize, running: int, spare: int) -> None:
        """After each step."""

    def slot_ended(self, trace: SlotTrace) -> None:
        """After a sequence left its slot."""

    def moved(self, kind: MoveKind, pages: int, us: int, ok: bool) -> None:
        """After a page move."""


class NullObserver:
    """Sees nothing."""

    def step_done(self, timing: StepTiming, size: StepSize, running: int, spare: int) -> None:
        """Nothing."""

    def slot_ended(self, trace: SlotTrace) -> None:
        """Nothing."""

    def moved(self, kind: MoveKind, pages: int, us: int, ok: bool) -> None:
        """Nothing."""

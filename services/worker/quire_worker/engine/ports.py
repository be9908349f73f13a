"""The Protocols of the parts that the engine needs: a device with its model runner, grammars, page bytes, an
observer."""

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
    """The result of a step. Each column has one entry per sequence of the batch."""

    token: Int32
    """[S, W] the sampled tokens that each sequence keeps, from the left, then negative numbers. W is 1 if no sequence
    has drafts. A sequence that samples, but has no token, no finish and no failure, was held: the step has no effect on
    it."""
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
    count: Int32 | None = None
    """Rows of each sequence that the step ran, if the device leaves out drafts; None: as launched."""


class Device(Protocol):
    """Runs steps in the order of launch, asynchronously. Only the model thread calls it, except for `close`."""

    wake: Callable[[], None]
    """Set by the run loop; called, from whatever thread, when a step has ended."""

    def launch(self, batch: StepBatch) -> None:
        """Accept a step, and return without waiting for it. The batch belongs to the device from now on: it writes the
        tokens that are fed back into `token`. The engine keeps at most `depth` steps in flight. If the launch itself
        fails, a device may run the step's sequences here, one at a time, and may raise DEVICE_BROKEN or DEVICE_HUNG."""

    def prepare(self) -> bool:
        """Do some of the work that was deferred at the start (CUDA graphs), for at most some tens of milliseconds.
        Returns whether some is left. The engine calls it while nothing is in flight and no message waits."""

    def take_outcomes(self) -> list[StepOutcome]:
        """Return the steps that ended since the last call, in order of launch, each once. Never blocks. Raises
        DEVICE_BROKEN, as `drain` does, if the device failed outside a step: it can run nothing any more."""

    def drain(self) -> None:
        """Wait until no step runs, and forget the outcomes: when this returns, no step writes to a page any more.
        Raises DEVICE_HUNG if a step does not end within the device's time limit: the device can run nothing any
        more."""

    def close(self) -> None:
        """Release everything. A running step is waited for, but only for a few seconds, as it may hang."""


class Runner(Protocol):
    """The model. Only the device's thread calls it. Every `token` of the batch is known by then."""

    def run(self, batch: StepBatch) -> StepOutput:
        """Compute one step; see step.py for shapes. May raise: the device then runs the step's sequences one at a time,
        to find those that cause the error. So a second run of the same positions must give the same result."""


class Drafter(Protocol):
    """Proposes draft tokens for speculative decoding. The device keeps a draft only if the model samples the same
    token, so a wrong draft costs only time. Called from the device's thread, before a step."""

    constrained_only: bool
    """Whether only sequences with a grammar ever have drafts."""

    def propose(self, batch: StepBatch) -> Int32:
        """Return token ids [S, max(batch.drafts)]. For each sequence, only its first `drafts` ids count, and of these
        only those before the first -1. The batch has its final tokens and positions, except for the drafts."""


class GrammarMatcher(Protocol):
    """Applies the grammars of sequences. Only the model thread calls it. Its process may be lost and start again:
    sequences wait meanwhile, and then continue with the same tokens."""

    wake: Callable[[], None]
    """Set by the run loop. The matcher calls it from any thread when `poll` has something to do."""

    def start(self) -> None:
        """Start its processes, unless they were started before. Raises OSError or RuntimeError if the system has no
        file descriptor or thread left. The next call then tries again."""

    def open_sequence(self, sequence: Sequence, grammar: str) -> RowConstraint:
        """Begin to apply a grammar to a sequence. Returns at once."""

    def close_sequence(self, constraint: RowConstraint) -> None:
        """End a sequence that has left its slot."""

    def poll(self) -> bool:
        """Process the matcher's messages. Returns whether `is_ready` or `failure` of a sequence may have changed since
        the last call."""

    def hold(self, constraint: RowConstraint) -> None:
        """Mark a sequence as not ready until its mask has come. The engine calls it after a step that lacked the
        mask."""


class RowGate(Protocol):
    """Holds sequences back: a step has no effect on a held sequence. The device's thread asks it in each step."""

    def held(self, batch: StepBatch) -> Bool:
        """[S] whether a sequence that would sample is held."""


class PageBytes(Protocol):
    """The device's pages as bytes, for moves. Called from the model thread, on pages that no step writes."""

    page_bytes: int

    def read_page(self, page: int, /) -> bytes | memoryview:
        """Return the bytes of one page, all layers, in the layout that the model declares. The result may be a view of
        the live page."""

    def write_page(self, page: int, data: bytes | memoryview, /) -> None:
        """Overwrite a page with `data`, exactly `page_bytes` in the same layout."""


@dataclass(frozen=True, slots=True)
class SlotTrace:
    """The trace of a sequence that has left its slot. Times are `time.time_ns()`; 0 means that the event did not
    happen."""

    context: RequestContext
    started_ns: int
    first_token_ns: int
    ended_ns: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish: Finish | None
    """None: the scheduler stopped it, or its run ended."""
    error_code: str = ""
    """The code of the error that ended it; empty: none did."""


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

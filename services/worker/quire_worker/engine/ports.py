"""What the engine needs of others, as Protocols: a model runner, a page pool, an observer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire_common.credit import Finish, MoveKind, StepTiming
    from quire_common.sequence import RequestContext
    from quire_worker.step import StepBatch, StepOutput


class Runner(Protocol):
    """The model. Called from the model thread alone."""

    def run(self, batch: StepBatch) -> StepOutput:
        """Compute one step; see step.py for shapes. May raise: the engine then looks for the row that is to blame, by
        running the step's sequences one at a time, so running the same positions twice must give the same."""


class PageBytes(Protocol):
    """The device's pages as bytes, for moves. Called from the mover's thread, on pages that no step writes."""

    page_bytes: int

    def read_page(self, page: int, /) -> bytes | memoryview:
        """All layers of one page, in the layout that the model declares; may be a view of the live page."""

    def write_page(self, page: int, data: bytes | memoryview, /) -> None:
        """The inverse; `data` holds exactly `page_bytes`."""


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

    def step_done(self, timing: StepTiming, prefill_tokens: int, tokens: int, running: int, spare: int) -> None:
        """After each step."""

    def slot_ended(self, trace: SlotTrace) -> None:
        """After a sequence left its slot."""

    def moved(self, kind: MoveKind, pages: int, ok: bool) -> None:
        """After a page move."""


class NullObserver:
    """Sees nothing."""

    def step_done(self, timing: StepTiming, prefill_tokens: int, tokens: int, running: int, spare: int) -> None:
        """Nothing."""

    def slot_ended(self, trace: SlotTrace) -> None:
        """Nothing."""

    def moved(self, kind: MoveKind, pages: int, ok: bool) -> None:
        """Nothing."""

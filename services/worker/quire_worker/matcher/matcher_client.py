"""MatcherClient: the engine's side of one process of the matcher. It gives seats to sequences, passes on the tokens
that they sample, and opens the seats again when the process is lost.

The next process replays the outputs of all sequences. The ring records on which sequences the lost process worked.
Their seats, and those of sequences in the same state, are opened behind all others that the process had, one at a
time, so that a grammar that crashes the process is identified. Its sequences fail after two such crashes; see
CrashRecord. Sequences that come later wait until the suspects are open.

A row that a step had to hold is not ready until the process says that its mask is there. Rows whose masks do not come
have their seats opened again, as after a loss, and fail in the end; see MaskWaits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from quire_common.errors import InvalidArgument, Unavailable
from quire_common.structured.constraint import CONSTRAINT_PARAM
from quire_common.telemetry.logs import get_logger
from quire_worker.matcher.crash_record import CrashRecord
from quire_worker.matcher.mask_waits import MaskWaits, Verdict
from quire_worker.matcher.matcher_metrics import MatcherMetrics
from quire_worker.matcher.row_constraint import NO_MASK_SLOT, RowConstraint
from quire_worker.matcher.wire import MatcherFrameKind, OpenMessage, pack_open
from quire_worker.side_process.frames import Frame, WireError
from quire_worker.side_process.process_link import ProcessLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.errors import QuireError
    from quire_common.sequence import Sequence as TokenSequence
    from quire_worker.matcher.mask_ring import MaskRing
    from quire_worker.sampling.token_mask import TokenMask

log = get_logger(__name__)
# Processes that were lost one after the other while a seat was to be opened, and none was: the next one will open none
# either.
MOST_LOST = 10
# Frames of seats that are not open yet, with grammars and outputs: the link gives up a process that leaves 16 MiB
# unread, and one that starts reads nothing for seconds.
MOST_OPENING_BYTES = 4 << 20


class MatcherLink(Protocol):
    """What ProcessLink does."""

    @property
    def pid(self) -> int | None:
        """See ProcessLink."""

    def send(self, incarnation: int, frame: Frame) -> bool:
        """See ProcessLink."""

    def take_frame(self) -> Frame | ProcessLost | None:
        """See ProcessLink."""

    def give_up(self, incarnation: int, why: str) -> None:
        """See ProcessLink."""

    def close(self) -> None:
        """See ProcessLink."""


class MatcherClient:
    """A GrammarMatcher. Methods belong to the model thread, but for those that RowConstraint passes on. The process
    starts with the first sequence that has a grammar, unless `start` was called before. It has these seats of the ring,
    and all of them unless others have some."""

    def __init__(
        self,
        ring: MaskRing,
        make_link: Callable[[Callable[[], None]], MatcherLink],
        clock: Callable[[], float] = time.monotonic,
        *,
        mask_slots: Sequence[int] | None = None,
        crashes: CrashRecord | None = None,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._ring = ring
        self._make_link = make_link
        self._link: MatcherLink | None = None
        self._incarnation = 1
        self._generations = 0
        # Guards what the device's thread changes too: outputs, what is to be sent, and who the process is.
        self._lock = threading.Lock()
        self._sampled: list[int] = []
        self._free_mask_slots = list(range(ring.mask_slots) if mask_slots is None else mask_slots)[::-1]
        self._waiting: deque[RowConstraint] = deque()
        self._by_mask_slot: dict[int, RowConstraint] = {}
        self._to_open: deque[RowConstraint] = deque()
        # Generations of those in `_to_open` that are to be opened alone.
        self._suspects: set[int] = set()
        self._opening: dict[int, int] = {}
        self._alone = False
        self._crashes = CrashRecord(clock) if crashes is None else crashes
        self._waits = MaskWaits(clock)
        self._lost = 0
        self._changed = False
        self._metrics = MatcherMetrics(clock)

    @property
    def ring(self) -> MaskRing:
        """The memory in which the process leaves masks."""
        return self._ring

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._link is None else self._link.pid

    @property
    def mask_totals(self) -> tuple[int, int]:
        """Return the number of masks that were made, and the nanoseconds that they took."""
        return self._ring.mask_totals

    @property
    def sequences(self) -> int:
        """The number of sequences whose grammars the process applies, or will."""
        return len(self._by_mask_slot) + len(self._waiting)

    def set_wake(self, wake: Callable[[], None]) -> None:
        """Have this called where `take_changes` has something to do."""
        self.wake = wake

    def start(self) -> None:
        """Start the process, unless that was done before."""
        if self._link is None:
            self._link = self._make_link(self._wake_model_thread)

    def open_sequence(self, sequence: TokenSequence, grammar: str) -> RowConstraint:
        """Give a sequence that starts a seat, now or when one is free, and have its grammar compiled."""
        self.start()
        self._generations += 1
        constraint = RowConstraint(sequence, grammar, self._generations, self)
        self._metrics.record_start(constraint.generation)
        self._waiting.append(constraint)
        self._assign_mask_slots()
        self._send_opens()
        return constraint

    def close_sequence(self, constraint: RowConstraint) -> None:
        """Take a sequence's seat away, since it has left its slot. Steps in flight may still name it: they find no
        mask."""
        constraint.end()
        self._metrics.record_end(constraint.generation)
        if constraint.mask_slot == NO_MASK_SLOT:
            self._waiting.remove(constraint)
        else:
            del self._by_mask_slot[constraint.mask_slot]
            if constraint in self._to_open:
                self._to_open.remove(constraint)
                self._suspects.discard(constraint.generation)
            self._opened(constraint)
            self._waits.forget(constraint)
            self._send(Frame(MatcherFrameKind.CLOSE, constraint.generation, constraint.mask_slot))
            self._free_mask_slots.append(constraint.mask_slot)
        self._assign_mask_slots()
        self._send_opens()

    def poll(self) -> bool:
        """Take in what the process has said, or its loss; returns whether a sequence's `is_ready` or `failure` may
        have changed since the last call."""
        while self._link is not None and (frame := self._link.take_frame()) is not None:
            if isinstance(frame, ProcessLost):
                self._reopen_all()
            else:
                try:
                    self._receive(frame)
                except (WireError, ValueError) as error:
                    self._link.give_up(self._incarnation, f"it sends nonsense: {error}")
            self._send_opens()
        masks = self._ring.mask_totals
        self._waits.note_masks(masks[0])
        self._check_waits()
        self._metrics.record_masks(masks)
        changed, self._changed = self._changed, False
        return changed

    def mask_at(self, constraint: RowConstraint, position: int) -> TokenMask | None:
        """Read a sequence's mask from the ring; None: it is not there."""
        if constraint.ended or constraint.mask_slot == NO_MASK_SLOT:
            return None
        return self._ring.mask_at(constraint.mask_slot, constraint.generation, position)

    def keep(self, constraint: RowConstraint, tokens: Sequence[int]) -> None:
        """Append sampled tokens to a sequence's output, to be sent by `flush`."""
        with self._lock:
            position = constraint.append(tokens)
            for nth, token in enumerate(tokens):
                self._sampled += constraint.mask_slot, constraint.generation, position + nth, token

    def flush(self) -> None:
        """Send the sampled tokens, unless a suspect is being opened."""
        with self._lock:
            self._flush_locked()

    def hold(self, constraint: RowConstraint) -> None:
        """Have the process say when a sequence's next mask is there, which a step found missing. Until then its row is
        not ready. Steps in flight may have drawn the token meanwhile: the process then says so at once."""
        self._metrics.count_held_row()
        if constraint.is_ready:
            constraint.set_held(True)
            self._waits.begin(constraint)
            position = constraint.next_position
            self._send(Frame.of(MatcherFrameKind.AWAIT, constraint.generation, constraint.mask_slot, [position]))

    def close(self) -> None:
        """End the process, and release the ring. Idempotent."""
        self._metrics.set_mask_slots(0, 0)
        if self._link is not None:
            self._link.close()
            self._link = None
        self._ring.close()

    def _flush_locked(self) -> None:
        if self._sampled and not self._alone:
            sampled, self._sampled = self._sampled, []
            self._send(Frame.of(MatcherFrameKind.TOKENS, 0, 0, sampled))

    def _assign_mask_slots(self) -> None:
        """Give the free seats to those that wait for one."""
        while self._free_mask_slots and self._waiting:
            constraint = self._waiting.popleft()
            constraint.assign_mask_slot(self._free_mask_slots.pop())
            self._by_mask_slot[constraint.mask_slot] = constraint
            self._waits.begin(constraint)
            self._to_open.append(constraint)
        self._metrics.set_mask_slots(len(self._by_mask_slot), len(self._waiting))

    def _send_opens(self) -> None:
        """Have seats opened in order, as many as the process may have unopened. A suspect waits until none is being
        opened, and those behind it wait until it is open."""
        while self._to_open and not self._alone and self._has_room_for(self._to_open[0]):
            constraint = self._to_open[0]
            if self._refuse(constraint):
                self._to_open.popleft()
                continue
            if self._is_suspect(constraint):
                if self._opening:
                    return
                self._suspects.discard(constraint.generation)
                with self._lock:
                    self._flush_locked()
                    self._alone = True
            self._to_open.popleft()
            self._send_open(constraint)

    def _has_room_for(self, constraint: RowConstraint) -> bool:
        """Whether a seat may be opened beside those that are being opened."""
        if not self._opening:
            return True
        is_small = sum(self._opening.values()) + constraint.open_bytes <= MOST_OPENING_BYTES
        return is_small and constraint.generation not in self._suspects

    def _is_suspect(self, constraint: RowConstraint) -> bool:
        """Whether a sequence's grammar may have ended the process: it is then to be opened alone."""
        if self._crashes and self._crashes.is_suspect(self._replay_key(constraint)):
            self._suspects.add(constraint.generation)
        return constraint.generation in self._suspects

    def _replay_key(self, constraint: RowConstraint) -> bytes:
        with self._lock:
            return constraint.replay_key()

    def _refuse(self, constraint: RowConstraint) -> bool:
        """Fail a sequence whose grammar has ended the process too often; returns whether it was so."""
        refused = bool(self._crashes) and self._crashes.is_refused(self._replay_key(constraint))
        if refused:
            self._fail(constraint, _crashed())
        return refused

    def _send_open(self, constraint: RowConstraint) -> None:
        """Have a seat opened with all that its sequence has sampled. Under the lock: what it draws from then on is sent
        behind."""
        with self._lock:
            self._opening[constraint.generation] = constraint.open_bytes
            opened = OpenMessage(
                mask_slot=constraint.mask_slot,
                generation=constraint.generation,
                position=constraint.first_position,
                output_ids=tuple(constraint.output),
                grammar=constraint.grammar,
            )
            self._send(pack_open(opened))

    def _receive(self, frame: Frame) -> None:
        """Take in one frame of the process. Raises WireError."""
        constraint = self._by_mask_slot.get(frame.subject)
        if constraint is None or constraint.generation != frame.generation:
            return
        self._changed = True
        if frame.kind == MatcherFrameKind.MASKED:
            constraint.set_held(False)
            self._waits.end(constraint)
            return
        self._opened(constraint)
        if frame.kind == MatcherFrameKind.OPENED:
            self._waits.end(constraint)
            self._metrics.record_opening(constraint.generation, frame.number())
            constraint.set_open(True)
            self._lost = 0
            if self._crashes:
                self._crashes.add_success(self._replay_key(constraint))
        elif frame.kind == MatcherFrameKind.FAILED:
            self._fail(constraint, _failed(frame.payload.decode(errors="replace")))
        elif frame.kind == MatcherFrameKind.TOO_SLOW:
            self._fail(constraint, _too_slow(frame.payload.decode(errors="replace")))
        else:
            raise WireError(f"{frame.kind.name} is none of the matcher's")

    def _opened(self, constraint: RowConstraint) -> None:
        """Note that a seat is no longer being opened. Tokens that were kept back meanwhile are sent."""
        if self._opening.pop(constraint.generation, None) is not None and self._alone:
            with self._lock:
                self._alone = False
                self._flush_locked()

    def _fail(self, constraint: RowConstraint, error: QuireError) -> None:
        constraint.fail(error)
        self._waits.forget(constraint)
        self._metrics.count_failure()
        self._changed = True

    def _reopen_all(self) -> None:
        """Have all seats opened again by the next process. Those on which the lost one worked come last, one at a time;
        the crash counts against the state of one on which it worked alone."""
        busy = self._ring.pop_busy()
        with self._lock:
            self._incarnation += 1
            # All that was sampled is in the outputs.
            self._sampled = []
            self._alone = False
        self._opening.clear()
        self._to_open.clear()
        reopened = [each for each in self._by_mask_slot.values() if each.failure is None]
        self._suspects = busy & {each.generation for each in reopened}
        self._lost += any(not each.is_open for each in reopened)
        for constraint in reopened:
            constraint.set_open(False)
            self._waits.begin(constraint)
            if busy == {constraint.generation}:
                self._crashes.add_crash(self._replay_key(constraint))
        for constraint in sorted(reopened, key=self._is_suspect):
            if self._lost >= MOST_LOST:
                self._fail(constraint, _unavailable(f"ended {MOST_LOST} times before it had applied one"))
            elif not self._refuse(constraint):
                self._to_open.append(constraint)
        self._changed = True

    def _check_waits(self) -> None:
        """Have the seats opened again of rows that have waited for a mask too long, and fail those that were given
        up."""
        replayed = False
        for constraint, verdict in self._waits.overdue():
            if verdict is Verdict.GIVE_UP:
                log.warning("a mask never came", generation=constraint.generation)
                self._fail(constraint, _unavailable("left no mask, however long the request waited"))
            else:
                log.warning("a mask is overdue; its grammar is replayed", generation=constraint.generation)
                constraint.set_open(False)
                self._metrics.count_replay()
                self._to_open.append(constraint)
                replayed = self._changed = True
        if replayed:
            self._send_opens()

    def _send(self, frame: Frame) -> None:
        """Send a frame to the present process; if it is gone, the next one is told all by its OPEN frames."""
        if self._link is not None:
            self._link.send(self._incarnation, frame)

    def _wake_model_thread(self) -> None:
        self.wake()


def _failed(cause: str) -> QuireError:
    """The error of a sequence whose grammar cannot go on."""
    return InvalidArgument(
        "GRAMMAR_FAILED",
        f"The request's grammar cannot be applied: {cause}",
        "Simplify it: fewer alternatives, shorter patterns, smaller bounds.",
        param=CONSTRAINT_PARAM,
    )


def _too_slow(cause: str) -> QuireError:
    """The error of a sequence whose grammar takes too much processor time."""
    return InvalidArgument(
        "GRAMMAR_TOO_SLOW",
        f"The request's grammar takes too long to apply: {cause}.",
        "Make it less ambiguous: for each text there should be one way to derive it.",
        param=CONSTRAINT_PARAM,
    )


def _unavailable(what: str) -> QuireError:
    """The error of sequences that wait for what does not come."""
    return Unavailable(
        "MATCHER_UNAVAILABLE",
        f"The process that applies grammars {what}.",
        "See the worker's log for the cause: the model's tokenizer may be one that it cannot read.",
    )


def _crashed() -> QuireError:
    """The error of a sequence whose grammar ended the matcher twice. The request is at fault: another replica's matcher
    would end too."""
    return InvalidArgument(
        "GRAMMAR_CRASHED",
        "The process that applies grammars ended twice while it worked on this request's alone.",
        "Change the grammar, and report it with the worker's log.",
        param=CONSTRAINT_PARAM,
    )

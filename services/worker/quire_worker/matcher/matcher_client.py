"""MatcherClient: the engine's side of one process of the matcher. It assigns mask slots to sequences, sends their
tokens to the process, and reads their masks.

To *open* a sequence, the process compiles its grammar, replays its output and writes the mask of the next token.

If the process is lost, the next one opens all sequences again. The mask ring records on which sequences the lost
process worked. These sequences, and others with the same replay key, are *suspects*. The next process opens them last,
and one at a time, so that another crash identifies the grammar. After two crashes, its sequences fail; see CrashRecord.
New sequences wait until the suspects are open.

If a step had to hold a row, the row is not ready until the process says that its mask is there. If the mask does not
come, the process opens the sequence again, and in the end the sequence fails; see MaskWaits.
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
# If so many processes in a row are lost before one opens a sequence, the next one would be lost too.
MOST_LOST = 10
# After a loss, other processes get the sequences that start, until this one has opened a sequence again.
RECOVERY_S = 30.0
# The most bytes of OPEN frames that the process has not answered. A process that starts reads nothing for seconds, and
# the link gives up a process that leaves 16 MiB unread.
MOST_OPENING_BYTES = 4 << 20


class MatcherLink(Protocol):
    """The methods of ProcessLink that MatcherClient calls."""

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
    """The methods belong to the model thread, except for `close`, and for those of MaskSource (`mask_at`, `add_tokens`,
    `count_forced_tokens`), which belong to the device's thread. The process starts with the first sequence that has a
    grammar, or by `start`. `mask_slots` are the mask slots that the client may assign; None: all of the ring.
    `lookahead`: the most lookahead masks of a sequence (see lookahead_grammar) that the process computes. The ring has
    room for them."""

    def __init__(
        self,
        ring: MaskRing,
        make_link: Callable[[Callable[[], None]], MatcherLink],
        clock: Callable[[], float] = time.monotonic,
        *,
        mask_slots: Sequence[int] | None = None,
        crashes: CrashRecord | None = None,
        lookahead: int = 0,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._ring = ring
        self._make_link = make_link
        self._link: MatcherLink | None = None
        self._incarnation = 1
        self._generations = 0
        # Guards the fields that the device's thread uses too: outputs, tokens to be sent, and the incarnation.
        self._lock = threading.Lock()
        self._sampled: list[int] = []
        self._free_mask_slots = list(range(ring.mask_slots) if mask_slots is None else mask_slots)[::-1]
        self._waiting: deque[RowConstraint] = deque()
        self._by_mask_slot: dict[int, RowConstraint] = {}
        self._to_open: deque[RowConstraint] = deque()
        # The generations of the sequences in `_to_open` that are to be opened alone.
        self._suspects: set[int] = set()
        self._opening_bytes: dict[int, int] = {}
        self._opens_suspect = False
        self._crashes = CrashRecord(clock) if crashes is None else crashes
        self._lookahead = lookahead
        self._waits = MaskWaits(clock)
        self._lost_in_a_row = 0
        self._clock = clock
        self._lost_s: float | None = None
        self._changed = False
        self._metrics = MatcherMetrics(clock)

    @property
    def ring(self) -> MaskRing:
        """The memory to which the process writes masks."""
        return self._ring

    @property
    def pid(self) -> int | None:
        """The process's id, while there is one."""
        return None if self._link is None else self._link.pid

    @property
    def mask_totals(self) -> tuple[int, int]:
        """See MaskRing."""
        return self._ring.mask_totals

    @property
    def sequences(self) -> int:
        """The number of sequences that have started and not ended."""
        return len(self._by_mask_slot) + len(self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether a sequence waits for a mask slot."""
        return bool(self._waiting)

    @property
    def has_free_mask_slot(self) -> bool:
        """Whether a sequence that starts would get a mask slot at once."""
        return bool(self._free_mask_slots) and not self._waiting

    @property
    def was_just_lost(self) -> bool:
        """Whether the process was lost less than RECOVERY_S ago, and has opened no sequence since."""
        return self._lost_s is not None and self._clock() - self._lost_s < RECOVERY_S

    def set_wake(self, wake: Callable[[], None]) -> None:
        """Set the function to call when `poll` has something to do."""
        self.wake = wake

    def start(self) -> None:
        """Start the process, unless it was started before."""
        if self._link is None:
            self._link = self._make_link(self._wake_model_thread)

    def open_sequence(self, sequence: TokenSequence, grammar: str) -> RowConstraint:
        """Start a sequence with a grammar, and the process if it has not started. The sequence gets a mask slot now, or
        when one is free; then the process opens it. Returns the sequence's record at once. A sequence whose grammar is
        refused fails when its turn comes."""
        self.start()
        self._generations += 1
        constraint = RowConstraint(sequence, grammar, self._generations, self)
        self._metrics.record_start(constraint.generation)
        self._add_waiting(constraint)
        return constraint

    def give_waiting(self, constraint: RowConstraint, to: MatcherClient) -> None:
        """Pass a sequence that waits for a mask slot to the client of another process, which goes on with its waiting
        time."""
        self._waiting.remove(constraint)
        began_s = self._metrics.record_end(constraint.generation)
        self._assign_mask_slots()
        to.adopt(constraint, began_s)

    def adopt(self, constraint: RowConstraint, began_s: float | None) -> None:
        """Take over, under a new generation, a sequence that waits for a mask slot since `began_s`. It gets a mask slot
        if one is free."""
        self._generations += 1
        constraint.move_to(self, self._generations)
        self._metrics.record_start(constraint.generation, began_s)
        self._add_waiting(constraint)

    def _add_waiting(self, constraint: RowConstraint) -> None:
        """Let the sequence wait for a mask slot; assign free ones to those that wait, and send their OPEN frames."""
        self._waiting.append(constraint)
        self._assign_mask_slots()
        self._send_opens()

    def close_sequence(self, constraint: RowConstraint) -> None:
        """End a sequence, since it has left its slot. If it has a mask slot, tell the process by CLOSE, and give the
        mask slot to the next that waits. Steps in flight may still ask for its masks, and find none."""
        constraint.end()
        self._metrics.record_end(constraint.generation)
        if constraint.mask_slot == NO_MASK_SLOT:
            self._waiting.remove(constraint)
        else:
            del self._by_mask_slot[constraint.mask_slot]
            self._cancel_opening(constraint)
            self._finish_opening(constraint)
            self._waits.forget(constraint)
            self._send(Frame(MatcherFrameKind.CLOSE, constraint.generation, constraint.mask_slot))
            self._free_mask_slots.append(constraint.mask_slot)
        self._assign_mask_slots()
        self._send_opens()

    def poll(self) -> bool:
        """Process the frames that have come and the loss of the process. Several times a second, also replay or fail
        sequences whose masks are overdue, and update the metrics of masks. A process that sends nonsense is given up.
        Returns whether `is_ready` or `failure` of a sequence may have changed since the last call."""
        while self._link is not None and (frame := self._link.take_frame()) is not None:
            if isinstance(frame, ProcessLost):
                self._reopen_all(had_process=frame.had_process)
            else:
                try:
                    self._receive(frame)
                except (WireError, ValueError) as error:
                    self._link.give_up(self._incarnation, f"it sends nonsense: {error}")
            self._send_opens()
        if self._waits.is_due():
            self._metrics.record_masks(made := self._ring.mask_totals)
            self._waits.record_progress(made[0])
            self._check_waits()
        changed, self._changed = self._changed, False
        return changed

    def mask_at(self, constraint: RowConstraint, position: int) -> TokenMask | None:
        """Read a sequence's mask from the ring; None: it is missing."""
        if constraint.ended or constraint.mask_slot == NO_MASK_SLOT:
            return None
        return self._ring.mask_at(constraint.mask_slot, constraint.generation, position)

    def add_tokens(self, sampled: Sequence[tuple[RowConstraint, Sequence[int]]]) -> None:
        """Append sampled tokens to their sequences' outputs, and send them in a TOKENS frame. Called on the device's
        thread; takes the lock. While a suspect is opened, the tokens are kept back. Of each sequence's tokens, all but
        the first count as forced."""
        if forced := sum(len(tokens) - 1 for _, tokens in sampled):
            self._metrics.count_forced_tokens(forced)
        with self._lock:
            for constraint, tokens in sampled:
                position = constraint.append(tokens)
                for nth, token in enumerate(tokens):
                    self._sampled += (constraint.mask_slot, constraint.generation, position + nth, token)
            self._flush_locked()

    def count_forced_tokens(self, count: int) -> None:
        """See MaskSource."""
        self._metrics.count_forced_tokens(count)

    def hold(self, constraint: RowConstraint) -> None:
        """Mark a sequence as not ready, since a step found its mask missing, and ask the process by AWAIT to say when
        the mask is there. If a step in flight has sampled that token meanwhile, AWAIT asks for the mask after it. The
        metrics count the row in any case; for a sequence that is not ready already, nothing else happens."""
        self._metrics.count_held_row()
        if constraint.is_ready:
            constraint.set_held(True)
            self._waits.start_wait(constraint)
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
        """Send the tokens that were sampled since the last TOKENS frame, unless a suspect is being opened. The caller
        holds the lock."""
        if self._sampled and not self._opens_suspect:
            sampled, self._sampled = self._sampled, []
            self._send(Frame.of(MatcherFrameKind.TOKENS, 0, 0, sampled))

    def _assign_mask_slots(self) -> None:
        """Assign free mask slots to the sequences that wait for one, first come, first served, start their waits for a
        first mask, and queue them to be opened. Update the metrics of mask slots."""
        while self._free_mask_slots and self._waiting:
            constraint = self._waiting.popleft()
            constraint.assign_mask_slot(self._free_mask_slots.pop())
            self._by_mask_slot[constraint.mask_slot] = constraint
            self._waits.start_wait(constraint)
            self._to_open.append(constraint)
        self._metrics.set_mask_slots(len(self._by_mask_slot), len(self._waiting))

    def _send_opens(self) -> None:
        """Send OPEN frames in order, as many as MOST_OPENING_BYTES allow, and one of any size if the process opens no
        other; a sequence with a refused grammar fails. A suspect waits until the process opens no other sequence, and
        the sequences behind it wait until its opening has ended. Before the OPEN of a suspect, and only then, the
        tokens sampled so far are sent; tokens sampled later are kept back until that opening has ended. Takes the
        lock."""
        while self._to_open and not self._opens_suspect and self._has_room_for(self._to_open[0]):
            constraint = self._to_open[0]
            if self._fail_if_refused(constraint):
                self._to_open.popleft()
                continue
            if self._is_suspect(constraint):
                if self._opening_bytes:
                    return
                self._suspects.discard(constraint.generation)
                with self._lock:
                    self._flush_locked()
                    self._opens_suspect = True
            self._to_open.popleft()
            self._send_open(constraint)

    def _has_room_for(self, constraint: RowConstraint) -> bool:
        """Whether the process may open this sequence now: always if it is opening no other. Else the OPEN frames of the
        sequences being opened and of this one must have at most MOST_OPENING_BYTES together. And this one must not be a
        suspect: a sequence on which a lost process was working, which is opened alone."""
        if not self._opening_bytes:
            return True
        is_small = sum(self._opening_bytes.values()) + constraint.open_bytes <= MOST_OPENING_BYTES
        return is_small and constraint.generation not in self._suspects

    def _is_suspect(self, constraint: RowConstraint) -> bool:
        """Whether a sequence's grammar may have crashed the process, so that it is to be opened alone. A sequence with
        a suspect replay key is added to the suspects. Takes the lock."""
        if self._crashes and self._crashes.is_suspect(self._replay_key(constraint)):
            self._suspects.add(constraint.generation)
        return constraint.generation in self._suspects

    def _replay_key(self, constraint: RowConstraint) -> bytes:
        with self._lock:
            return constraint.replay_key()

    def _fail_if_refused(self, constraint: RowConstraint) -> bool:
        """Fail a sequence if its replay key, grammar and output so far, has crashed the process too often. Returns
        whether it failed."""
        refused = bool(self._crashes) and self._crashes.is_refused(self._replay_key(constraint))
        if refused:
            self._fail(constraint, _grammar_crashed_error())
        return refused

    def _send_open(self, constraint: RowConstraint) -> None:
        """Send the OPEN frame of a sequence with its output so far. Takes the lock, which the caller must not hold, so
        that tokens sampled from now on are sent after it. Counts the frame's bytes as unanswered. Allows no lookahead
        masks to a grammar on which a lost process worked."""
        with self._lock:
            self._opening_bytes[constraint.generation] = constraint.open_bytes
            opened = OpenMessage(
                mask_slot=constraint.mask_slot,
                generation=constraint.generation,
                position=constraint.first_position,
                output_ids=tuple(constraint.output),
                grammar=constraint.grammar,
                lookahead=self._lookahead if self._crashes.allows_lookahead(constraint.grammar) else 0,
            )
            self._send(pack_open(opened))

    def _receive(self, frame: Frame) -> None:
        """Process one frame of the matcher's process. MASKED and OPENED make its sequence ready, unless it has failed;
        FAILED and TOO_SLOW fail it. All but MASKED end the sequence's opening. OPENED also clears the count of losses
        in a row, `was_just_lost`, and the suspicion of its replay key. Frames for sequences that have left are ignored,
        of whatever kind. Raises WireError for any other kind, after it has ended the opening."""
        constraint = self._by_mask_slot.get(frame.subject)
        if constraint is None or constraint.generation != frame.generation:
            return
        self._changed = True
        if frame.kind == MatcherFrameKind.MASKED:
            constraint.set_held(False)
            self._waits.end_wait(constraint)
            return
        self._finish_opening(constraint)
        if frame.kind == MatcherFrameKind.OPENED:
            self._waits.end_wait(constraint)
            self._metrics.record_opening(constraint.generation, frame.number())
            constraint.set_open(True)
            self._lost_in_a_row, self._lost_s = 0, None
            if self._crashes:
                self._crashes.add_success(self._replay_key(constraint))
        elif frame.kind == MatcherFrameKind.FAILED:
            self._fail(constraint, _grammar_failed_error(frame.payload.decode(errors="replace")))
        elif frame.kind == MatcherFrameKind.TOO_SLOW:
            self._fail(constraint, _grammar_too_slow_error(frame.payload.decode(errors="replace")))
        else:
            raise WireError(f"{frame.kind.name} is none of the matcher's")

    def _cancel_opening(self, constraint: RowConstraint) -> None:
        """Remove a sequence from those that are to be opened, if it is one of them."""
        if constraint in self._to_open:
            self._to_open.remove(constraint)
            self._suspects.discard(constraint.generation)

    def _finish_opening(self, constraint: RowConstraint) -> None:
        """Record that the process no longer opens a sequence. If it was a suspect, send the tokens that were kept back,
        under the lock."""
        if self._opening_bytes.pop(constraint.generation, None) is not None and self._opens_suspect:
            with self._lock:
                self._opens_suspect = False
                self._flush_locked()

    def _fail(self, constraint: RowConstraint, error: QuireError) -> None:
        """Fail a sequence with this error, stop its wait for a mask, and count it; `poll` then reports a change. One
        that has failed keeps its first error: the process may still fail a sequence that was given up."""
        if constraint.failure is None:
            constraint.fail(error)
            self._waits.forget(constraint)
            self._metrics.count_failure()
            self._changed = True

    def _reopen_all(self, *, had_process: bool) -> None:
        """Queue all sequences that have a mask slot and have not failed for the next process, suspects last; none is
        ready until it is open again. Tokens not sent yet are dropped, since the outputs have them. Grammars on which
        the lost process worked get no more lookahead. If the lost process worked on one sequence alone, the crash
        counts against the replay key of this sequence. Refused sequences fail. A lost process counts if a sequence was
        not open; after MOST_LOST in a row without an opening, all fail. Suspects stay until opened, failed or ended."""
        busy, self._lost_s = self._ring.pop_busy(), self._clock()
        alone = set(self._opening_bytes) if self._opens_suspect else set()
        with self._lock:
            self._incarnation += 1
            self._sampled = []
            self._opens_suspect = False
        self._opening_bytes.clear()
        self._to_open.clear()
        reopened = [each for each in self._by_mask_slot.values() if each.failure is None]
        self._suspects = (busy | alone | self._suspects) & {each.generation for each in reopened}
        self._lost_in_a_row += had_process and any(not each.is_open for each in reopened)
        for constraint in reopened:
            if constraint.generation in busy:
                self._crashes.forbid_lookahead(constraint.grammar)
            constraint.set_open(False)
            self._waits.start_wait(constraint)
            if busy == {constraint.generation}:
                self._crashes.add_crash(self._replay_key(constraint))
        for constraint in sorted(reopened, key=self._is_suspect):
            if self._lost_in_a_row >= MOST_LOST:
                self._fail(constraint, _matcher_unavailable_error(f"ended {MOST_LOST} times before it had applied one"))
            elif not self._fail_if_refused(constraint):
                self._to_open.append(constraint)
        self._changed = True

    def _check_waits(self) -> None:
        """Have the process open again, and so replay, the sequences whose mask is overdue. Fail those that MaskWaits
        gives up, and do not open them any more."""
        replayed = False
        for constraint, verdict in self._waits.overdue():
            if verdict is Verdict.GIVE_UP:
                log.warning("a mask never came", generation=constraint.generation)
                self._cancel_opening(constraint)
                self._fail(constraint, _matcher_unavailable_error("left no mask, however long the request waited"))
            else:
                log.warning("a mask is overdue; its grammar is replayed", generation=constraint.generation)
                constraint.set_open(False)
                self._metrics.count_replay()
                self._to_open.append(constraint)
                replayed = self._changed = True
        if replayed:
            self._send_opens()

    def _send(self, frame: Frame) -> None:
        """Send a frame to the current process. If it is gone, OPEN frames will tell the next one the same."""
        if self._link is not None:
            self._link.send(self._incarnation, frame)

    def _wake_model_thread(self) -> None:
        self.wake()


def _grammar_failed_error(cause: str) -> QuireError:
    """Return the InvalidArgument for a sequence whose grammar cannot be applied; `cause` is in its text."""
    return InvalidArgument(
        "GRAMMAR_FAILED",
        f"The request's grammar cannot be applied: {cause}",
        "Simplify it: fewer alternatives, shorter patterns, smaller bounds.",
        param=CONSTRAINT_PARAM,
    )


def _grammar_too_slow_error(cause: str) -> QuireError:
    """Return the InvalidArgument for a sequence whose grammar takes too much processor time; `cause` is in its text."""
    return InvalidArgument(
        "GRAMMAR_TOO_SLOW",
        f"The request's grammar takes too long to apply: {cause}.",
        "Make it less ambiguous: for each text there should be one way to derive it.",
        param=CONSTRAINT_PARAM,
    )


def _matcher_unavailable_error(what: str) -> QuireError:
    """Return the Unavailable error for a sequence whose masks do not come. `what` ends its sentence that begins with
    the process."""
    return Unavailable(
        "MATCHER_UNAVAILABLE",
        f"The process that applies grammars {what}.",
        "See the worker's log for the cause: the model's tokenizer may be one that it cannot read.",
    )


def _grammar_crashed_error() -> QuireError:
    """Return the InvalidArgument for a sequence whose grammar crashed the process twice. It is an error of the request,
    so that routers do not try another replica, whose matcher would crash too."""
    return InvalidArgument(
        "GRAMMAR_CRASHED",
        "The process that applies grammars ended twice while it worked on this request's alone.",
        "Change the grammar, and report it with the worker's log.",
        param=CONSTRAINT_PARAM,
    )

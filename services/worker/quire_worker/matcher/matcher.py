"""Matcher: applies the grammars of all sequences in the matcher's process.

It compiles a grammar for each sequence that the engine opens, advances it by the tokens that the engine sends, and
writes the mask of the next token to the mask ring. Where a grammar forces tokens, the matcher also writes lookahead
masks, which lookahead_grammar explains. It knows nothing of sockets.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_common.telemetry.logs import get_logger
from quire_worker.matcher.cpu_budget import CpuBudget, GrammarTooSlow
from quire_worker.matcher.guidance_backend import GrammarError
from quire_worker.matcher.lookahead_grammar import LookaheadGrammar
from quire_worker.matcher.matcher_threads import SLOW_NS, VERY_SLOW_NS, MatcherThread
from quire_worker.matcher.wire import MatcherFrameKind, unpack_open, unpack_tokens
from quire_worker.side_process.frames import Frame, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from quire_worker.matcher.guidance_backend import GuidanceBackend
    from quire_worker.matcher.mask_ring import MaskRing
    from quire_worker.matcher.matcher_threads import InlineExecutor
    from quire_worker.matcher.wire import OpenMessage
    from quire_worker.sampling.token_mask import TokenMask

log = get_logger(__name__)
# After so much processor time, a replay lets others run.
REPLAY_NS = 20_000_000
_REPLAY_TOKENS = 64
# The most grammars that are remembered as very slow.
_MOST_SLOW_TEXTS = 1024


@dataclass
class _ConstrainedSequence:
    """A sequence with a grammar. Only its thread works on it; it moves to another thread between two pieces of
    work."""

    mask_slot: int
    generation: int
    text_hash: int
    """A hash of its grammar's text."""
    position: int
    """The position of the next token."""
    thread: MatcherThread = MatcherThread.COMPILE
    thread_after_compile: MatcherThread = MatcherThread.QUICK
    """The thread that computes its masks when the replay is complete."""
    grammar: LookaheadGrammar | None = None
    """None: not replayed yet, failed or closed."""
    failed: bool = False
    closed: bool = False
    masked: int = -1
    """The last position whose mask is in the ring; lookahead masks do not count."""
    awaited: int = -1
    """The engine waits for the mask of this position; -1: for none."""
    pending: list[int] = field(default_factory=list)
    """Tokens that have come and that its thread has not taken yet. Those that come during the replay were sampled with
    a mask of the process before this one."""
    budget: CpuBudget = field(default_factory=CpuBudget)

    def resume(self, before: _ConstrainedSequence) -> None:
        """Continue the budget and the thread of the same sequence, which is opened again for a replay."""
        self.thread_after_compile, self.budget = before.thread_after_compile, copy.copy(before.budget)

    def begin(self, grammar: LookaheadGrammar) -> None:
        """Note that its grammar is compiled and replayed."""
        self.grammar, self.thread = grammar, self.thread_after_compile

    def slow_down(self) -> None:
        """Move the sequence to the slow thread, for good: now, or when its replay is complete."""
        self.thread_after_compile = MatcherThread.SLOW
        if self.thread != MatcherThread.COMPILE:
            self.thread = MatcherThread.SLOW

    def fail(self) -> None:
        """Give up its grammar."""
        self.grammar, self.failed = None, True

    def close(self) -> None:
        """Drop the grammar, since the sequence has left. Work that is still queued for it does nothing."""
        self.closed, self.grammar = True, None

    def await_mask(self, position: int) -> None:
        """Note that the engine waits for a mask."""
        self.awaited = position

    def record_mask(self, position: int) -> bool:
        """Note that the mask of a position is in the ring. Returns whether the engine waited for it; see
        `pop_awaited`."""
        self.masked = max(self.masked, position)
        return self.pop_awaited()

    def pop_awaited(self) -> bool:
        """Return whether the engine waits for a mask, and this one or a later one was written; if so, the engine waits
        no longer."""
        is_there = 0 <= self.awaited <= self.masked
        if is_there:
            self.awaited = -1
        return is_there

    def add_token(self, token: int) -> None:
        """Add one more sampled token."""
        self.position += 1
        self.pending.append(token)

    def pop_pending(self) -> list[int]:
        """Remove and return the tokens that its thread has not taken yet."""
        pending, self.pending = self.pending, []
        return pending


class Matcher:
    """`receive` belongs to the quick thread. It calls `send` from any thread."""

    def __init__(
        self,
        backend: GuidanceBackend,
        ring: MaskRing,
        send: Callable[[Frame], None],
        executors: Mapping[MatcherThread, InlineExecutor],
    ) -> None:
        self._backend = backend
        self._ring = ring
        self._send = send
        self._sequences: dict[int, _ConstrainedSequence] = {}
        # Tokens may come while a replay ends, and a sequence may leave while its mask is computed: its mask slot may
        # then belong to another sequence. So this lock guards the pending tokens and the writes to the ring.
        self._lock = threading.Lock()
        self._executors = executors
        self._slow_texts: dict[int, None] = {}

    def receive(self, frame: Frame) -> None:
        """Process a frame of the engine: TOKENS, OPEN, CLOSE or AWAIT. Raises WireError for any other frame, or a
        malformed one."""
        if frame.kind == MatcherFrameKind.TOKENS:
            self._add_tokens(unpack_tokens(frame).tolist())
        elif frame.kind == MatcherFrameKind.OPEN:
            self._open(unpack_open(frame))
        elif frame.kind == MatcherFrameKind.CLOSE:
            self._close(frame.subject, frame.generation)
        elif frame.kind == MatcherFrameKind.AWAIT:
            self._await_mask(frame)
        else:
            raise WireError(f"{frame.kind.name} is none of the engine's")

    def finalize_if_overdue(self) -> bool:
        """Whether a thread has worked on one sequence for too long, so that the process must end. Then the ring names
        the sequences of such threads, and those alone, until the process ends."""
        executors = self._executors.values()
        if not any(executor.is_overdue for executor in executors):
            return False
        for executor in executors:
            executor.finalize_record()
        return True

    def _open(self, opened: OpenMessage) -> None:
        """Give a mask slot to a sequence in place of the one before, and queue the compilation of its grammar. A
        sequence that is opened again keeps its thread and its time budget. Raises WireError for an unknown mask
        slot."""
        if not 0 <= opened.mask_slot < self._ring.mask_slots:
            raise WireError(f"mask slot {opened.mask_slot} of {self._ring.mask_slots}")
        before = self._sequences.get(opened.mask_slot)
        self._close(opened.mask_slot)
        sequence = _ConstrainedSequence(
            opened.mask_slot, opened.generation, hash(opened.grammar), opened.position + len(opened.output_ids)
        )
        if before is not None and before.generation == opened.generation:
            sequence.resume(before)
        self._sequences[opened.mask_slot] = sequence
        self._executors[MatcherThread.COMPILE].submit(
            opened.generation, lambda: self._compile_sequence(sequence, opened)
        )

    def _compile_sequence(self, sequence: _ConstrainedSequence, opened: OpenMessage) -> None:
        """Compile a sequence's grammar, and start its replay, on the compile thread. If that fails, tell the engine.
        Does nothing for a closed sequence."""
        if sequence.closed:
            return
        try:
            grammar, elapsed_ns = self._backend.compile_grammar(opened.grammar)
        except GrammarError as error:
            self._fail(sequence, error)
            return
        replayed = LookaheadGrammar(grammar, opened.position, opened.lookahead, sequence.budget, time.thread_time_ns)
        self._replay(sequence, replayed, deque(opened.output_ids), elapsed_ns)

    def _replay(
        self, sequence: _ConstrainedSequence, grammar: LookaheadGrammar, left: deque[int], compile_ns: int
    ) -> None:
        """Advance a sequence by the output that is left and by tokens that come meanwhile, write its first mask and its
        lookahead masks, and send OPENED, on the compile thread. Also send MASKED if the engine waits for the mask. If
        the first mask took more than SLOW_NS, there are no lookahead masks, and the sequence moves to the slow thread.
        A long replay takes turns with other work of the compile thread. If the sequence was closed before a turn,
        nothing more is done; if it is closed during the last turn, OPENED is sent all the same. If the grammar fails,
        tell the engine."""
        if sequence.closed:
            return
        until_ns = time.thread_time_ns() + REPLAY_NS
        try:
            while left:
                grammar.accept_tokens([left.popleft() for _ in range(min(_REPLAY_TOKENS, len(left)))])
                if time.thread_time_ns() > until_ns:
                    self._executors[MatcherThread.COMPILE].submit(
                        sequence.generation, lambda: self._replay(sequence, grammar, left, compile_ns)
                    )
                    return
            mask = grammar.compute_mask([])
            if sequence.budget.last_ns <= SLOW_NS:
                self._look_ahead(sequence, grammar, MatcherThread.COMPILE)
            while not self._end_replay(sequence, grammar, mask):
                mask = grammar.compute_mask(self._pop_pending(sequence))
        except GrammarError as error:
            self._fail(sequence, error)
            return
        self._send(Frame.of(MatcherFrameKind.OPENED, sequence.generation, sequence.mask_slot, [-(-compile_ns // 1000)]))

    def _look_ahead(self, sequence: _ConstrainedSequence, grammar: LookaheadGrammar, thread: MatcherThread) -> None:
        """Compute and write lookahead masks, as many as the engine wants. Stops without an error if the grammar fails,
        if the sequence was closed, and after a slow mask, which moves its sequence to the slow thread. Takes the lock
        for each mask, and adds each but the slow one to the ring's mask totals of `thread`."""
        began = time.perf_counter_ns()
        while (ahead := grammar.look_ahead()) is not None:
            with self._lock:
                if sequence.closed:
                    return
                self._ring.put(sequence.mask_slot, sequence.generation, *ahead)
                if sequence.budget.last_ns > SLOW_NS:
                    self._slow_down_locked(sequence)
                    return
            ended = time.perf_counter_ns()
            self._ring.count_mask(thread, ended - began)
            began = ended

    def _end_replay(self, sequence: _ConstrainedSequence, grammar: LookaheadGrammar, mask: TokenMask) -> bool:
        """Write the mask of a replayed sequence, move the sequence to the thread that computes its masks, and send
        MASKED if the engine waits for this mask. A slow mask moves the sequence to the slow thread. Takes the lock.
        Returns False, and does nothing, if more tokens have come; returns True, and does nothing, for a closed
        sequence."""
        with self._lock:
            if sequence.closed:
                return True
            if sequence.pending:
                return False
            sequence.begin(grammar)
            awaited = self._put_locked(sequence, grammar.position, mask)
        if awaited:
            self._send_masked(sequence)
        return True

    def _put_locked(self, sequence: _ConstrainedSequence, position: int, mask: TokenMask) -> bool:
        """Write a mask to the ring, unless the sequence has left meanwhile; the caller holds the lock. A slow mask
        moves its sequence to the slow thread. Returns whether the engine waits for the mask."""
        if sequence.budget.last_ns > SLOW_NS:
            self._slow_down_locked(sequence)
        if sequence.closed:
            return False
        self._ring.put(sequence.mask_slot, sequence.generation, position, mask)
        return sequence.record_mask(position)

    def _slow_down_locked(self, sequence: _ConstrainedSequence) -> None:
        """Move a sequence to the slow thread; the caller holds the lock. If its mask took more than VERY_SLOW_NS, all
        other sequences with its grammar follow when their next tokens come; the last 1024 such grammars are
        remembered."""
        sequence.slow_down()
        if sequence.budget.last_ns > VERY_SLOW_NS:
            self._slow_texts[sequence.text_hash] = None
            if len(self._slow_texts) > _MOST_SLOW_TEXTS:
                del self._slow_texts[next(iter(self._slow_texts))]

    def _await_mask(self, frame: Frame) -> None:
        """Answer MASKED when the mask of a position is there, now or later; a new wait of a sequence replaces the one
        before. Ignores sequences that have left or failed. Raises WireError for a malformed frame."""
        position = frame.number()
        sequence = self._sequences.get(frame.subject)
        if sequence is None or sequence.generation != frame.generation or sequence.failed:
            return
        with self._lock:
            sequence.await_mask(position)
            is_there = sequence.pop_awaited()
        if is_there:
            self._send_masked(sequence)

    def _send_masked(self, sequence: _ConstrainedSequence) -> None:
        self._send(Frame(MatcherFrameKind.MASKED, sequence.generation, sequence.mask_slot))

    def _pop_pending(self, sequence: _ConstrainedSequence) -> list[int]:
        with self._lock:
            return sequence.pop_pending()

    def _add_tokens(self, rows: Sequence[Sequence[int]]) -> None:
        """Take in sampled tokens. The masks after them are computed here and now for sequences of the quick thread,
        which calls this, and queued for those of the slow thread; then lookahead masks follow for the quick ones. A
        sequence with a very slow grammar moves to the slow thread first. `rows` are mask slot, generation, position and
        token. Tokens of a sequence that is being replayed are kept for the replay. Skips tokens that a replay has
        consumed already, and those of sequences that have left or failed. Raises WireError if a token is missing."""
        fed: dict[int, _ConstrainedSequence] = {}
        for mask_slot, generation, position, token in rows:
            sequence = self._sequences.get(mask_slot)
            if sequence is None or sequence.generation != generation or sequence.failed or position < sequence.position:
                continue
            if position != sequence.position:
                raise WireError(f"a token of position {position} where {sequence.position} is next")
            with self._lock:
                sequence.add_token(token)
                if sequence.thread != MatcherThread.COMPILE:
                    fed[mask_slot] = sequence
        for sequence in fed.values():
            if sequence.text_hash in self._slow_texts:
                sequence.slow_down()
            self._executors[sequence.thread].submit(sequence.generation, self._step(sequence), sequence.budget.last_ns)
        # Lookahead masks come after the next masks of all sequences, since steps need them later.
        for sequence in fed.values():
            self._submit_lookahead(sequence)

    def _submit_lookahead(self, sequence: _ConstrainedSequence) -> None:
        """Compute the lookahead masks of a sequence, if the sequence belongs to the quick thread. The grammar of any
        other sequence is not touched, since another thread may be changing it at this moment."""
        grammar = sequence.grammar
        if sequence.thread == MatcherThread.QUICK and grammar is not None and grammar.can_look_ahead:
            self._executors[MatcherThread.QUICK].submit(
                sequence.generation, lambda: self._look_ahead(sequence, grammar, MatcherThread.QUICK)
            )

    def _step(self, sequence: _ConstrainedSequence) -> Callable[[], None]:
        """Return a function, to be run on the sequence's thread, that advances the sequence by its pending tokens and
        writes its next mask. An earlier such function may have taken the tokens already."""
        thread = sequence.thread

        def step() -> None:
            """Advance the sequence, write its mask, and send MASKED if the engine waits for it. If the grammar fails,
            tell the engine. Does nothing without pending tokens, or if the sequence was closed or has failed. A
            lookahead mask that is in the ring is not written again; a new mask counts in the ring's totals."""
            grammar, tokens = sequence.grammar, self._pop_pending(sequence)
            if sequence.closed or grammar is None or not tokens:
                return
            began, computed = time.perf_counter_ns(), grammar.masks_computed
            try:
                mask = grammar.compute_mask(tokens)
            except GrammarError as error:
                self._fail(sequence, error)
                return
            elapsed_ns, is_new = time.perf_counter_ns() - began, grammar.masks_computed > computed
            with self._lock:
                # A lookahead mask is in the ring already. While it is written again, steps would not find it.
                if is_new:
                    awaited = self._put_locked(sequence, grammar.position, mask)
                else:
                    awaited = not sequence.closed and sequence.record_mask(grammar.position)
            if awaited:
                self._send_masked(sequence)
            if is_new:
                self._ring.count_mask(thread, elapsed_ns)

        return step

    def _fail(self, sequence: _ConstrainedSequence, error: GrammarError) -> None:
        """Give up a sequence's grammar, log the cause, and send it to the engine: TOO_SLOW for too much processor time,
        else FAILED."""
        sequence.fail()
        cause = str(error)
        log.warning("a grammar failed", cause=cause)
        kind = MatcherFrameKind.TOO_SLOW if isinstance(error, GrammarTooSlow) else MatcherFrameKind.FAILED
        self._send(Frame(kind, sequence.generation, sequence.mask_slot, cause.encode()))

    def _close(self, mask_slot: int, generation: int = 0) -> None:
        """Forget the sequence of a mask slot, if it has this generation; 0: any."""
        sequence = self._sequences.get(mask_slot)
        if sequence is not None and generation in (0, sequence.generation):
            with self._lock:
                sequence.close()
            del self._sequences[mask_slot]

"""Lookahead masks (masks after forced tokens): where the matcher writes them, when it computes them, and on which
thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from quire_worker.matcher.lookahead_grammar import LookaheadGrammar
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.matcher.matcher import Matcher
from quire_worker.matcher.matcher_threads import SLOW_NS, InlineExecutor, MatcherThread, ThreadExecutor
from quire_worker.matcher.wire import MatcherFrameKind, OpenMessage, pack_open
from quire_worker.sampling.token_mask import MaskKind, TokenMask
from quire_worker.side_process.frames import Frame
from tests.fakes.worker.local_matcher import masks_after
from tests.unit.worker.matcher.letter_rows import BACKEND, VOCAB, A, B, C

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from quire_worker.matcher.guidance_backend import GuidanceBackend

TEXT = 'start: "ABC" /[A-D]/ "ABC" /[A-D]/'
MASK = masks_after(BACKEND, TEXT)
ROW_TOKENS = 4
LOOKAHEAD = 2 * ROW_TOKENS - 1
D = C + 1


class RecordingRing:
    """The entries of a MaskRing, and the order in which masks were written: (mask slot, position)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mask_slots: int = 4) -> None:
        self.ring = MaskRing.create(mask_slots, 2 * ROW_TOKENS, VOCAB)
        self.written: list[tuple[int, int]] = []
        put = self.ring.put

        def put_and_record(mask_slot: int, generation: int, position: int, mask: TokenMask) -> None:
            self.written.append((mask_slot, position))
            put(mask_slot, generation, position, mask)

        monkeypatch.setattr(self.ring, "put", put_and_record)

    def pop_written(self) -> list[tuple[int, int]]:
        """Return what was written since the last call."""
        written, self.written[:] = self.written[:], []
        return written


class CountingClock:
    """A clock of processor time that tests advance."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Letters:
    """A grammar that forces the letters of its text, by number. Its masks take so much processor time: `cost_ns`, by
    the number of the letter."""

    def __init__(self, clock: CountingClock, cost_ns: dict[int, int]) -> None:
        self.consumed: list[int] = []
        self._clock = clock
        self._cost_ns = cost_ns

    def accept_tokens(self, tokens: Iterable[int]) -> None:
        self.consumed += tokens

    def compute_mask(self) -> TokenMask:
        self._clock.now_ns += self._cost_ns.get(len(self.consumed), 0)
        return TokenMask(MaskKind.ONE, len(self.consumed), b"")


class LettersBackend:
    def __init__(self, clock: CountingClock, cost_ns: dict[int, int]) -> None:
        self.grammars: list[Letters] = []
        self._make: Callable[[], Letters] = lambda: Letters(clock, cost_ns)

    def compile_grammar(self, text: str) -> tuple[Letters, int]:
        self.grammars.append(self._make())
        return self.grammars[-1], 1


def a_matcher(ring: MaskRing, backend: object = BACKEND, frames: list[Frame] | None = None) -> Matcher:
    executors = {thread: InlineExecutor(thread, ring) for thread in MatcherThread}
    told: list[Frame] = [] if frames is None else frames
    return Matcher(cast("GuidanceBackend", backend), ring, told.append, executors)


def open_sequence(
    matcher: Matcher, mask_slot: int = 0, output: tuple[int, ...] = (), lookahead: int = LOOKAHEAD
) -> None:
    """Open the sequence of generation 1 + `mask_slot`. Its first output token has the position 10."""
    matcher.receive(pack_open(OpenMessage(mask_slot, 1 + mask_slot, 10, output, TEXT, lookahead)))


def add_tokens(matcher: Matcher, position: int, tokens: dict[int, list[int]]) -> None:
    """Send tokens, by mask slot, in one frame."""
    rows = [
        (mask_slot, 1 + mask_slot, position + nth, token)
        for mask_slot, some in tokens.items()
        for nth, token in enumerate(some)
    ]
    matcher.receive(Frame.of(MatcherFrameKind.TOKENS, 0, 0, np.array(rows).reshape(-1)))


def masks_from(ring: MaskRing, position: int, count: int) -> list[TokenMask | None]:
    return [ring.mask_at(0, 1, position + nth) for nth in range(count)]


@pytest.mark.parametrize("output", [(), (A,), (A, B, C, D)])
def test_opened_sequence_has_its_lookahead_masks(output: tuple[int, ...]) -> None:
    ring = MaskRing.create(1, 2 * ROW_TOKENS, VOCAB)
    open_sequence(a_matcher(ring), output=output)
    forced = [[A, B, C], [B, C], [], [], [A, B, C]][len(output)]
    expected = [MASK([*output, *forced[:nth]]) for nth in range(1 + len(forced))]
    assert masks_from(ring, 10 + len(output), len(expected) + 1) == [*expected, None]


def test_sampled_tokens_bring_new_lookahead_masks() -> None:
    ring = MaskRing.create(1, 2 * ROW_TOKENS, VOCAB)
    matcher = a_matcher(ring)
    open_sequence(matcher)
    add_tokens(matcher, 10, {0: [A, B]})
    assert masks_from(ring, 12, 3) == [MASK([A, B]), MASK([A, B, C]), None]
    add_tokens(matcher, 12, {0: [C, D]})
    answer = [A, B, C, D, A, B, C]
    assert masks_from(ring, 14, 5) == [*[MASK(answer[:count]) for count in (4, 5, 6, 7)], None]


def test_sequence_opened_without_lookahead_gets_no_lookahead_masks() -> None:
    ring = MaskRing.create(1, 2 * ROW_TOKENS, VOCAB)
    matcher = a_matcher(ring)
    open_sequence(matcher, lookahead=0)
    add_tokens(matcher, 10, {0: [A]})
    assert masks_from(ring, 11, 2) == [MASK([A]), None]


def test_lookahead_masks_overwrite_no_mask_that_a_step_may_still_read() -> None:
    """In a very long chain of forced tokens, the mask slot is full, and the next token's mask is in it."""
    clock = CountingClock()
    ring = MaskRing.create(1, 2 * ROW_TOKENS, VOCAB)
    matcher = a_matcher(ring, LettersBackend(clock, {}))
    open_sequence(matcher)
    for position in range(10, 40):
        found = masks_from(ring, position, 2 * ROW_TOKENS)
        assert [None if mask is None else mask.token for mask in found] == [
            position - 10 + nth for nth in range(2 * ROW_TOKENS)
        ]
        add_tokens(matcher, position, {0: [position - 10]})


def test_next_masks_of_all_sequences_come_before_lookahead_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = RecordingRing(monkeypatch)
    matcher = a_matcher(recording.ring)
    for mask_slot in range(3):
        open_sequence(matcher, mask_slot, (A, B, C))
    recording.pop_written()
    add_tokens(matcher, 13, {mask_slot: [D] for mask_slot in range(3)})
    ahead = [(mask_slot, position) for mask_slot in range(3) for position in (15, 16, 17)]
    assert recording.written == [(0, 14), (1, 14), (2, 14), *ahead]


def test_lookahead_mask_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that reads the mask while it is written would find it missing."""
    recording = RecordingRing(monkeypatch)
    matcher = a_matcher(recording.ring)
    open_sequence(matcher)
    assert sorted(recording.pop_written()) == [(0, 10), (0, 11), (0, 12), (0, 13)]
    add_tokens(matcher, 10, {0: [A]})
    add_tokens(matcher, 11, {0: [B, C]})
    assert recording.pop_written() == []
    add_tokens(matcher, 13, {0: [D]})
    assert recording.pop_written() == [(0, 14), (0, 15), (0, 16), (0, 17)]


def test_awaited_lookahead_mask_is_announced_when_its_tokens_have_come() -> None:
    frames: list[Frame] = []
    ring = MaskRing.create(1, 2 * ROW_TOKENS, VOCAB)
    matcher = a_matcher(ring, frames=frames)
    open_sequence(matcher)
    matcher.receive(Frame.of(MatcherFrameKind.AWAIT, 1, 0, [12]))
    assert [frame.kind for frame in frames] == [MatcherFrameKind.OPENED]
    add_tokens(matcher, 10, {0: [A, B]})
    assert [frame.kind for frame in frames] == [MatcherFrameKind.OPENED, MatcherFrameKind.MASKED]


@pytest.mark.parametrize("opens", [True, False], ids=["while it is opened", "while it samples"])
def test_sequence_with_a_slow_lookahead_mask_goes_to_the_slow_thread(
    opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow thread computes no lookahead masks."""
    clock = CountingClock()
    monkeypatch.setattr("quire_worker.matcher.matcher.time.thread_time_ns", clock)
    ring = MaskRing.create(1, 2 * ROW_TOKENS, VOCAB)
    slow = 2 if opens else 2 * ROW_TOKENS
    backend = LettersBackend(clock, {slow: 2 * SLOW_NS})
    matcher = a_matcher(ring, backend)
    open_sequence(matcher)
    if not opens:
        assert matcher._sequences[0].thread is MatcherThread.QUICK
        add_tokens(matcher, 10, {0: [0]})
    assert matcher._sequences[0].thread is MatcherThread.SLOW
    consumed = len(backend.grammars[0].consumed)
    assert consumed == slow, "the slow mask is the last one"
    add_tokens(matcher, 10 if opens else 11, {0: [0 if opens else 1]})
    assert len(backend.grammars[0].consumed) == consumed


def matcher_with_a_slow_first_mask(monkeypatch: pytest.MonkeyPatch) -> tuple[Matcher, MaskRing]:
    """The matcher has opened one sequence."""
    clock = CountingClock()
    monkeypatch.setattr("quire_worker.matcher.matcher.time.thread_time_ns", clock)
    ring = MaskRing.create(1, 2 * ROW_TOKENS, VOCAB)
    matcher = a_matcher(ring, LettersBackend(clock, {0: 2 * SLOW_NS}))
    open_sequence(matcher)
    return matcher, ring


def test_sequence_whose_first_mask_is_slow_has_no_lookahead_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher, ring = matcher_with_a_slow_first_mask(monkeypatch)
    assert matcher._sequences[0].thread is MatcherThread.SLOW
    assert [mask is not None for mask in masks_from(ring, 10, 3)] == [True, False, False]


def test_quick_thread_does_not_touch_the_grammar_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread may be changing the grammar at this moment."""
    matcher, ring = matcher_with_a_slow_first_mask(monkeypatch)
    touched: list[LookaheadGrammar] = []
    monkeypatch.setattr(LookaheadGrammar, "can_look_ahead", property(touched.append))
    add_tokens(matcher, 10, {0: [0]})
    assert touched == [] and ring.mask_at(0, 1, 11) is not None


def test_tokens_reach_the_grammar_in_order_whatever_the_order_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow thread does first what is expected to take least, and that may be the later one of two steps."""
    clock = CountingClock()
    monkeypatch.setattr("quire_worker.matcher.matcher.time.thread_time_ns", clock)
    ring = MaskRing.create(1, 2 * ROW_TOKENS, VOCAB)
    slow = ThreadExecutor(MatcherThread.SLOW, ring, lambda: None)
    executors = {thread: InlineExecutor(thread, ring) for thread in MatcherThread} | {MatcherThread.SLOW: slow}
    backend = LettersBackend(clock, {0: 2 * SLOW_NS})
    matcher = Matcher(cast("GuidanceBackend", backend), ring, lambda frame: None, executors)
    open_sequence(matcher)
    started, free, done = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        assert free.wait(30)

    slow.submit(9, block)
    assert started.wait(30)
    budget = matcher._sequences[0].budget
    for number, expected_s in enumerate((900, 300, 600)):
        budget.last_ns = expected_s * 10**9
        add_tokens(matcher, 10 + number, {0: [number]})
    slow.submit(9, done.set, 10**12)
    free.set()
    assert done.wait(30)
    assert backend.grammars[0].consumed == [0, 1, 2]
    found = ring.mask_at(0, 1, 13)
    assert found is not None and found.token == 3


def test_lookahead_masks_of_a_closed_sequence_are_not_written() -> None:
    clock = CountingClock()
    ring = MaskRing.create(1, 2 * ROW_TOKENS, VOCAB)
    backend = LettersBackend(clock, {})
    matcher = a_matcher(ring, backend)
    open_sequence(matcher)
    compute_mask, calls = backend.grammars[0].compute_mask, 0

    def leave() -> TokenMask:
        nonlocal calls
        calls += 1
        matcher.receive(Frame(MatcherFrameKind.CLOSE, 1, 0))
        return compute_mask()

    backend.grammars[0].compute_mask = leave  # type: ignore[method-assign]  # it leaves in the middle
    add_tokens(matcher, 10, {0: [0]})
    assert calls == 1 and ring.mask_at(0, 1, 10 + 2 * ROW_TOKENS) is None

"""The matcher: late masks of sequences that left, its threads, and the processor time of a sequence's masks."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from quire_worker.matcher.cpu_budget import AVERAGE_NS, TOKEN_NS, CpuBudget, GrammarTooSlow
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.matcher.matcher import Matcher
from quire_worker.matcher.matcher_threads import (
    CPU_LIMIT_S,
    SLOW_NS,
    VERY_SLOW_NS,
    WALL_LIMIT_S,
    InlineExecutor,
    MatcherThread,
    ThreadExecutor,
)
from quire_worker.matcher.wire import MatcherFrameKind, OpenMessage, pack_open
from quire_worker.sampling.token_mask import MaskKind, TokenMask
from quire_worker.side_process.frames import Frame
from tests.fakes.worker.local_matcher import letter_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from quire_worker.matcher.guidance_backend import GuidanceBackend

VOCAB = 64


class SlowGrammar:
    """Its masks allow the token that is the number of tokens before; `meanwhile` happens while the last one is made."""

    def __init__(self, text: str, meanwhile: Callable[[], None]) -> None:
        self._left = int(text)
        self._count = 0
        self._meanwhile = meanwhile

    def accept_tokens(self, tokens: Iterable[int]) -> None:
        self._count += len(list(tokens))

    def compute_mask(self) -> TokenMask:
        self._left -= 1
        if not self._left:
            self._meanwhile()
        return TokenMask(MaskKind.ONE, self._count, b"")


class SlowBackend:
    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None

    def compile_grammar(self, text: str) -> tuple[SlowGrammar, int]:
        return SlowGrammar(text, self.meanwhile), 1


class RecordingExecutor(InlineExecutor):
    """Records its thread and the sequence of each piece of work."""

    def __init__(self, thread: MatcherThread, ring: MaskRing, worked: list[tuple[MatcherThread, int]]) -> None:
        super().__init__(thread, ring)
        self._worked = worked

    def submit(self, generation: int, work: Callable[[], None], expected_ns: int = 0) -> None:
        self._worked.append((self.thread, generation))
        super().submit(generation, work)


def recording(ring: MaskRing, worked: list[tuple[MatcherThread, int]]) -> dict[MatcherThread, InlineExecutor]:
    return {thread: RecordingExecutor(thread, ring, worked) for thread in MatcherThread}


@pytest.mark.parametrize("masks", [1, 2], ids=["while it is opened", "while it samples"])
def test_late_mask_of_a_sequence_that_left_does_not_replace_that_of_the_next(masks: int) -> None:
    """Both positions share an entry of the ring."""
    ring = MaskRing.create(1, 2, VOCAB)
    backend = SlowBackend()
    executors = {thread: InlineExecutor(thread, ring) for thread in MatcherThread}
    matcher = Matcher(cast("GuidanceBackend", backend), ring, lambda frame: None, executors)

    def reuse_mask_slot() -> None:
        matcher.receive(Frame(MatcherFrameKind.CLOSE, 1, 0))
        matcher.receive(pack_open(OpenMessage(0, 2, 20, (), "9")))

    backend.meanwhile = reuse_mask_slot
    matcher.receive(pack_open(OpenMessage(0, 1, 10 if masks == 1 else 9, (), str(masks))))
    if masks == 2:
        matcher.receive(Frame.of(MatcherFrameKind.TOKENS, 0, 0, np.array([0, 1, 9, 5])))
    found = ring.mask_at(0, 2, 20)
    assert found is not None and found.token == 0
    assert ring.mask_at(0, 1, 10) is None


@pytest.mark.parametrize(
    ("mask_ns", "thread"), [(SLOW_NS // 2, MatcherThread.QUICK), (2 * SLOW_NS, MatcherThread.SLOW)]
)
def test_sequence_whose_first_mask_took_long_starts_on_the_slow_thread(
    mask_ns: int, thread: MatcherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = [0]
    monkeypatch.setattr("quire_worker.matcher.matcher.time.thread_time_ns", lambda: now_ns[0])
    ring = MaskRing.create(1, 2, VOCAB)
    backend = SlowBackend()
    backend.meanwhile = lambda: now_ns.append(now_ns.pop() + mask_ns)
    worked: list[tuple[MatcherThread, int]] = []
    matcher = Matcher(cast("GuidanceBackend", backend), ring, lambda frame: None, recording(ring, worked))
    matcher.receive(pack_open(OpenMessage(0, 1, 10, (), "1")))
    matcher.receive(Frame.of(MatcherFrameKind.TOKENS, 0, 0, np.array([0, 1, 10, 5])))
    assert worked == [(MatcherThread.COMPILE, 1), (thread, 1)]


class SequenceAtMatcher:
    """A matcher that does all work on the test's thread, and one sequence in it whose answer repeats one letter."""

    def __init__(self, backend: GuidanceBackend, text: str) -> None:
        self.frames: list[Frame] = []
        self.ring = MaskRing.create(1, 2, VOCAB)
        executors = {thread: InlineExecutor(thread, self.ring) for thread in MatcherThread}
        self.matcher = Matcher(backend, self.ring, self.frames.append, executors)
        self.matcher.receive(pack_open(OpenMessage(0, 1, 0, (), text)))
        self.tokens = 0
        self.text = text

    def replay(self, generation: int = 1) -> None:
        """Open the sequence once more, with all that was sampled."""
        self.matcher.receive(pack_open(OpenMessage(0, generation, 0, (17,) * self.tokens, self.text)))

    def draw(self) -> None:
        self.matcher.receive(Frame.of(MatcherFrameKind.TOKENS, 0, 0, np.array([0, 1, self.tokens, 17])))
        self.tokens += 1

    @property
    def failure(self) -> Frame | None:
        return self.frames[-1] if self.frames[-1].kind is not MatcherFrameKind.OPENED else None


class Clock:
    """A clock that a test moves on; with `step_ns`, each look at it does."""

    def __init__(self, step_ns: int = 0) -> None:
        self.now_ns = 0
        self._step_ns = step_ns

    def __call__(self) -> int:
        self.now_ns += self._step_ns
        return self.now_ns

    def advance(self, elapsed_ns: int) -> None:
        self.now_ns += elapsed_ns


class CostlyBackend(SlowBackend):
    """Each mask takes so much of a clock."""

    def __init__(self, clock: Clock, mask_ns: int) -> None:
        super().__init__()
        self.mask_ns = mask_ns
        self._clock = clock

    def compile_grammar(self, text: str) -> tuple[SlowGrammar, int]:
        return CostlyGrammar(text, lambda: self._clock.advance(self.mask_ns)), 1


class CostlyGrammar(SlowGrammar):
    def compute_mask(self) -> TokenMask:
        self._meanwhile()
        return TokenMask(MaskKind.ONE, self._count, b"")


@pytest.mark.parametrize(
    ("token_ns", "limit"),
    [(AVERAGE_NS, None), (3 * AVERAGE_NS, 200), (TOKEN_NS, 21), (TOKEN_NS + 1_000_000, 0)],
    ids=["as allowed", "three times the average", "as much as one may", "more than one may"],
)
def test_sequence_whose_tokens_take_too_much_processor_time_fails(
    token_ns: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("quire_worker.matcher.matcher.time.thread_time_ns", clock)
    sequence = SequenceAtMatcher(cast("GuidanceBackend", CostlyBackend(clock, token_ns)), "1")
    while sequence.failure is None and sequence.tokens < 2000:
        sequence.draw()
    if limit is None:
        assert sequence.failure is None
        return
    assert abs(sequence.tokens - limit) <= 2
    assert sequence.failure is not None and sequence.failure.kind is MatcherFrameKind.TOO_SLOW
    assert b"processor time" in sequence.failure.payload


@pytest.mark.parametrize(
    ("tokens", "spent_ns", "token_ms"),
    [(0, TOKEN_NS + 1, 101), (1, 2 * TOKEN_NS, 200), (4, 5 * TOKEN_NS, 125)],
)
def test_error_of_a_slow_grammar_has_the_time_of_one_token(tokens: int, spent_ns: int, token_ms: int) -> None:
    with pytest.raises(GrammarTooSlow, match=f"one token took {token_ms} ms of processor time, at most 100 ms are"):
        CpuBudget().charge(spent_ns, tokens)


def test_replays_give_a_slow_sequence_no_more_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("quire_worker.matcher.matcher.time.thread_time_ns", clock)
    sequence = SequenceAtMatcher(cast("GuidanceBackend", CostlyBackend(clock, 3 * AVERAGE_NS)), "1")
    while sequence.failure is None:
        assert sequence.tokens <= 202
        sequence.draw()
        if sequence.tokens % 20 == 0:
            sequence.replay()
    assert sequence.failure.kind is MatcherFrameKind.TOO_SLOW


def test_replayed_sequence_stays_on_the_slow_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("quire_worker.matcher.matcher.time.thread_time_ns", clock)
    backend = CostlyBackend(clock, 2 * SLOW_NS)
    sequence = SequenceAtMatcher(cast("GuidanceBackend", backend), "1")
    backend.mask_ns = 0
    for _ in range(2):
        sequence.replay()
        assert sequence.matcher._sequences[0].thread is MatcherThread.SLOW
    sequence.replay(generation=2)  # another sequence
    assert sequence.matcher._sequences[0].thread is MatcherThread.QUICK


def test_time_that_others_take_from_the_processor_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_worker.matcher.matcher.time.perf_counter_ns", Clock(10**10))
    sequence = SequenceAtMatcher(letter_backend(VOCAB, (1, 2)), "start: /[A-D]+/")
    for _ in range(20):
        sequence.draw()
    assert sequence.failure is None and sequence.matcher._sequences[0].thread is MatcherThread.QUICK


def test_slow_thread_does_first_what_is_expected_to_take_least() -> None:
    ring = MaskRing.create(1, 2, VOCAB)
    executor = ThreadExecutor(MatcherThread.SLOW, ring, lambda: None)
    started, free, done = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        started.set()
        assert free.wait(30)

    executor.submit(1, first, 10**12)
    assert started.wait(30)
    for name, expected_s in (("slowest", 900), ("slow", 500), ("as slow", 500), ("fast", 300)):
        executor.submit(1, lambda name=name: order.append(name), expected_s * 10**9)  # type: ignore[misc]  # bound now
    executor.submit(1, done.set, 10**12)
    free.set()
    assert done.wait(30)
    assert order == ["fast", "slow", "as slow", "slowest"]


def test_dearer_mask_is_made_though_cheaper_ones_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve sequences ask for their next mask as soon as they have one; a thirteenth is a little slower."""
    clock = Clock()
    monkeypatch.setattr("quire_worker.matcher.matcher_threads.time.monotonic_ns", clock)
    executor = ThreadExecutor(MatcherThread.SLOW, MaskRing.create(1, 2, VOCAB), lambda: None)
    done = threading.Event()
    cheap_ns, dear_ns, served = 2_100_000, 2_500_000, [0] * 12

    def make_cheap(sequence: int) -> None:
        clock.advance(cheap_ns)
        served[sequence] += 1
        if not done.is_set() and served[sequence] < 50:
            executor.submit(1, lambda: make_cheap(sequence), cheap_ns)

    def begin() -> None:
        for sequence in range(12):
            executor.submit(1, lambda sequence=sequence: make_cheap(sequence), cheap_ns)  # type: ignore[misc]  # bound now
        executor.submit(2, done.set, dear_ns)

    executor.submit(1, begin)
    assert done.wait(30)
    assert max(served) <= 2


def test_work_that_is_queued_for_a_closed_sequence_keeps_no_grammar() -> None:
    """Replays and cancelled requests leave such work."""
    backend = letter_backend(VOCAB, (1, 2))
    sequence = SequenceAtMatcher(backend, "start: /[A-D]+/")
    found = weakref.ref(sequence.matcher._sequences[0].grammar)
    step = sequence.matcher._step(sequence.matcher._sequences[0])
    assert found() is not None
    sequence.replay()
    assert found() is None
    step()  # harms nobody
    assert sequence.failure is None


def test_long_replay_makes_way_for_the_next_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of a long output and one that begins are opened at once: the second does not wait for the first."""
    monkeypatch.setattr("quire_worker.matcher.matcher.REPLAY_NS", 0)
    ring = MaskRing.create(2, 2, VOCAB)
    told: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    executors: dict[MatcherThread, InlineExecutor] = {thread: InlineExecutor(thread, ring) for thread in MatcherThread}
    executors[MatcherThread.COMPILE] = ThreadExecutor(MatcherThread.COMPILE, ring, lambda: None)
    matcher = Matcher(letter_backend(VOCAB, (1, 2)), ring, told.put, executors)
    matcher.receive(pack_open(OpenMessage(0, 1, 0, (17,) * 60_000, "start: /[A-D]+/")))
    matcher.receive(pack_open(OpenMessage(1, 2, 0, (), "start: /[A-D]+/")))
    opened = [told.get(timeout=60).generation for _ in range(2)]
    assert opened == [2, 1]
    assert ring.mask_at(0, 1, 60_000) is not None


def test_thread_that_waits_for_a_processor_is_not_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, or after the process was stopped for a while. Work that computes as long is overdue."""
    executor = InlineExecutor(MatcherThread.COMPILE, MaskRing.create(1, 2, VOCAB))
    overdue: list[bool] = []
    began_s = time.monotonic()

    def work() -> None:
        monkeypatch.setattr("quire_worker.matcher.matcher_threads.time.monotonic", lambda: began_s + 2 * CPU_LIMIT_S)
        overdue.append(executor.is_overdue)
        monkeypatch.setattr("quire_worker.matcher.matcher_threads.time.monotonic", lambda: began_s + 2 * WALL_LIMIT_S)
        overdue.append(executor.is_overdue)
        monkeypatch.setattr("quire_worker.matcher.matcher_threads.time.monotonic", lambda: began_s)
        monkeypatch.setattr("quire_worker.matcher.matcher_threads.CPU_LIMIT_S", -1.0)
        overdue.append(executor.is_overdue)

    assert not executor.is_overdue
    executor.submit(1, work)
    assert overdue == [False, True, True] and not executor.is_overdue


def test_process_that_ends_itself_records_the_thread_that_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = MaskRing.create(1, 2, VOCAB)
    executors = {thread: InlineExecutor(thread, ring) for thread in MatcherThread}
    matcher = Matcher(cast("GuidanceBackend", SlowBackend()), ring, lambda frame: None, executors)
    assert not matcher.finalize_if_overdue()
    monkeypatch.setattr(
        type(executors[MatcherThread.SLOW]), "is_overdue", property(lambda self: self.thread is MatcherThread.SLOW)
    )
    ring.set_busy(MatcherThread.QUICK, 7)
    ring.set_busy(MatcherThread.SLOW, 8)
    assert matcher.finalize_if_overdue() and ring.pop_busy() == {8}


def test_thread_that_goes_on_until_the_process_ends_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process finds one thread overdue; meanwhile the others go on working."""
    monkeypatch.setattr("quire_worker.matcher.matcher_threads.CPU_LIMIT_S", -1.0)
    ring = MaskRing.create(1, 2, VOCAB)
    executors = {thread: InlineExecutor(thread, ring) for thread in MatcherThread}
    matcher = Matcher(cast("GuidanceBackend", SlowBackend()), ring, lambda frame: None, executors)
    blamed: list[set[int]] = []

    def work() -> None:
        assert matcher.finalize_if_overdue()
        executors[MatcherThread.QUICK].submit(55, lambda: blamed.append(ring.pop_busy()))

    executors[MatcherThread.COMPILE].submit(44, work)
    executors[MatcherThread.COMPILE].submit(
        66, lambda: blamed.append(ring.pop_busy())
    )  # nor is what the guilty one does next
    assert blamed == [{44}, set()]


@pytest.mark.parametrize(("mask_ns", "slow"), [(2 * SLOW_NS, 1), (2 * VERY_SLOW_NS, 4)])
def test_all_sequences_of_a_very_slow_grammar_leave_the_quick_thread(
    mask_ns: int, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of them would block that thread once, for as long as one token may take."""
    clock = Clock()
    monkeypatch.setattr("quire_worker.matcher.matcher.time.thread_time_ns", clock)
    ring, backend, worked = MaskRing.create(6, 2, VOCAB), SlowBackend(), list[tuple[MatcherThread, int]]()

    matcher = Matcher(cast("GuidanceBackend", backend), ring, lambda frame: None, recording(ring, worked))
    for mask_slot in range(4):
        matcher.receive(pack_open(OpenMessage(mask_slot, mask_slot + 1, 10, (), "2")))
    matcher.receive(pack_open(OpenMessage(4, 5, 10, (), "9")))
    del worked[:]
    backend.meanwhile = lambda: clock.advance(mask_ns)
    matcher._sequences[0].grammar._grammar._meanwhile = backend.meanwhile  # type: ignore[union-attr]  # a fake's
    for place in (10, 11):
        for mask_slot in range(5):
            matcher.receive(Frame.of(MatcherFrameKind.TOKENS, 0, 0, np.array([mask_slot, mask_slot + 1, place, 5])))
    assert {generation for thread, generation in worked if thread is MatcherThread.SLOW} == set(range(1, slow + 1))
    assert worked[0] == (MatcherThread.QUICK, 1) and (MatcherThread.QUICK, 5) in worked
    assert ((MatcherThread.QUICK, 2) in worked) == (slow == 1)

"""The engine's side of the matcher: mask slots, tokens, and what becomes of them when the process is lost."""

from __future__ import annotations

import pytest

from quire_common.telemetry import metrics
from quire_worker.matcher.mask_waits import MOST_MISSES, MOST_REPLAYS, MOST_WAIT_S, OVERDUE_S, SILENT_S
from quire_worker.matcher.matcher_client import MOST_OPENING_BYTES
from quire_worker.matcher.row_constraint import RowConstraint
from quire_worker.matcher.wire import MatcherFrameKind, open_frame_bytes
from quire_worker.side_process.frames import Frame
from tests.fakes.worker.local_matcher import LocalMatcher, masks_after
from tests.unit.worker.matcher.letter_rows import (
    BACKEND,
    TEXT,
    VOCAB,
    A,
    B,
    C,
    a_matcher,
    allowed,
    held,
    keep,
    open_row,
    opened,
    take_all,
    wanted,
)


def test_masks_follow_the_tokens_of_each_sequence() -> None:
    matcher = a_matcher()
    rows = [open_row(matcher) for _ in range(3)]
    assert matcher.client.poll() and all(row.is_open for row in rows)
    assert not matcher.client.poll()
    for number, row in enumerate(rows):
        keep(row, *[A, B, C][: number + 1])
        assert allowed(row, number + 1) == wanted(*[A, B, C][: number + 1])
        assert allowed(row, number + 2) is None


def test_sequence_that_continues_begins_behind_its_output() -> None:
    row = open_row(a_matcher(), (A, B, C))
    assert allowed(row, 3) == wanted(A, B, C) and allowed(row, 0) is None


def test_tokens_of_a_step_travel_together() -> None:
    matcher = a_matcher()
    rows = [open_row(matcher) for _ in range(3)]
    rows[0].mask_source.add_tokens([(row, [A]) for row in rows])
    assert [frame.kind for frame in matcher.link.heard].count(MatcherFrameKind.TOKENS) == 1
    assert all(allowed(row, 1) == wanted(A) for row in rows)


def test_sequence_without_a_free_mask_slot_waits_for_one() -> None:
    matcher = a_matcher(mask_slots=2)
    first, second, third, fourth = (open_row(matcher) for _ in range(4))
    matcher.client.poll()
    assert [row.is_open for row in (first, second, third, fourth)] == [True, True, False, False]
    assert allowed(third, 0) is None
    matcher.client.close_sequence(third)  # it waits no longer
    matcher.client.close_sequence(first)
    matcher.client.poll()
    assert fourth.is_open and allowed(fourth, 0) == wanted() and allowed(first, 0) is None


def test_grammar_that_cannot_be_compiled_fails_its_sequence_alone() -> None:
    matcher = a_matcher()
    bad, good = open_row(matcher, text="start: nonsense"), open_row(matcher)
    assert matcher.client.poll()
    assert bad.failure is not None and bad.failure.code == "GRAMMAR_FAILED" and "nonsense" in bad.failure.message
    assert good.failure is None and good.is_open


def test_lost_process_is_replayed_and_the_same_masks_come() -> None:
    matcher = a_matcher()
    rows = [open_row(matcher) for _ in range(3)]
    keep(rows[1], A)
    keep(rows[2], A, B)
    matcher.prompt = False
    matcher.link.lose()
    keep(rows[0], C)  # drawn by a mask of the lost process, before the loss is known
    assert matcher.client.poll() and not any(row.is_open for row in rows)
    matcher.prompt = True
    matcher.on_send(matcher.link)
    assert matcher.client.poll() and all(row.is_open for row in rows)
    assert [allowed(rows[0], 1), allowed(rows[1], 1), allowed(rows[2], 2)] == [wanted(C), wanted(A), wanted(A, B)]


def test_token_that_comes_twice_is_consumed_once() -> None:
    """One is drawn by a mask of the lost process after the replay began: it is in the replay, and sent behind it."""
    matcher = a_matcher()
    row = open_row(matcher)
    matcher.link.lose()
    matcher.prompt = False
    keep(row, A)
    matcher.client.poll()
    matcher.prompt = True
    keep(row, B)
    assert allowed(row, 2) == wanted(A, B) and not matcher.link.gave_up


def test_reused_mask_slot_has_no_mask_of_the_sequence_before() -> None:
    matcher = a_matcher(mask_slots=1)
    first = open_row(matcher)
    keep(first, A)
    matcher.client.close_sequence(first)
    matcher.prompt = False
    second = open_row(matcher)
    assert second.mask_slot == first.mask_slot and allowed(second, 1) is None and allowed(first, 1) is None


@pytest.mark.parametrize("loses", [False, True])
def test_large_grammars_are_opened_a_few_at_a_time(loses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link gives up a process that leaves too much unread."""
    monkeypatch.setattr("quire_worker.matcher.matcher_client.MOST_OPENING_BYTES", 3 * open_frame_bytes(0, len(TEXT)))
    matcher = a_matcher(prompt=False)
    rows = [open_row(matcher) for _ in range(8)]
    if loses:
        matcher.link.lose()
        matcher.client.poll()
    assert len(matcher.link.unheard) == 3
    while matcher.link.hear():
        assert len(matcher.link.unheard) <= 3
        matcher.client.poll()
    assert all(row.is_open for row in rows)


def test_long_outputs_are_replayed_a_few_at_a_time() -> None:
    matcher = a_matcher(256, prompt=False)
    output = (A,) * 17_000
    rows = [open_row(matcher, output) for _ in range(256)]
    matcher.link.lose()
    matcher.client.poll()
    unread, opened_rows = matcher.link.unheard, 0
    while unread:
        assert MOST_OPENING_BYTES - (1 << 17) < sum(len(frame.pack()) for frame in unread) <= MOST_OPENING_BYTES or (
            opened_rows + len(unread) == 256
        )
        for _ in range(len(unread)):
            frame = unread.popleft()
            matcher.link._tell(Frame.of(MatcherFrameKind.OPENED, frame.generation, frame.subject, [1]))
            opened_rows += 1
        matcher.client.poll()
    assert opened_rows == 256 and all(row.is_open for row in rows)


def test_nonsense_of_the_process_gives_it_up() -> None:
    matcher = a_matcher()
    row = open_row(matcher)
    matcher.client.poll()
    frame = matcher.link.heard[0]
    assert frame.kind is MatcherFrameKind.OPEN
    matcher.link._tell(frame)  # a frame that only the engine sends
    matcher.client.poll()
    assert len(matcher.link.gave_up) == 1 and row.failure is None


def test_held_row_is_not_ready_until_its_mask_is_there() -> None:
    matcher = a_matcher()
    row, other = open_row(matcher), open_row(matcher)
    take_all(matcher)
    matcher.prompt = False
    keep(row, A)
    assert held(matcher, row, 1) and not row.is_ready and other.is_ready
    matcher.client.hold(row)  # by the step behind it
    take_all(matcher)
    assert not row.is_ready
    matcher.link.hear()  # the token: its mask is made
    matcher.client.poll()
    assert not row.is_ready
    matcher.prompt = True
    matcher.on_send(matcher.link)
    assert matcher.client.poll() and row.is_ready and allowed(row, 1) == wanted(A)
    assert [frame.kind for frame in matcher.link.heard].count(MatcherFrameKind.AWAIT) == 1


def test_mask_that_is_awaited_before_its_token_is_known_comes_behind_it() -> None:
    matcher = a_matcher()
    row = open_row(matcher)
    take_all(matcher)
    matcher.prompt = False
    keep(row, A)
    assert held(matcher, row, 1)
    take_all(matcher)
    assert not row.is_ready
    matcher.prompt = True
    matcher.on_send(matcher.link)
    assert matcher.client.poll() and row.is_ready and allowed(row, 1) == wanted(A)


def spoil(matcher: LocalMatcher, row: RowConstraint) -> None:
    """Write over the mask of the row's next token."""
    matcher.ring.put(row.mask_slot, row.generation + 99, row.next_position, masks_after(BACKEND, TEXT)([]))


def test_row_whose_mask_is_lost_is_replayed_after_a_few_steps() -> None:
    matcher = a_matcher()
    row, other = open_row(matcher), open_row(matcher)
    keep(row, A)
    keep(other, B)
    take_all(matcher)
    spoil(matcher, row)
    for _ in range(MOST_MISSES + 2):
        assert row.is_ready and held(matcher, row, 1)
        take_all(matcher)
    assert row.is_ready and allowed(row, 1) == wanted(A) and allowed(other, 1) == wanted(B)
    assert opened(matcher) == [row.generation, other.generation, row.generation]


def test_row_whose_mask_is_always_lost_fails_and_no_other() -> None:
    matcher = a_matcher()
    row, other = open_row(matcher), open_row(matcher)
    take_all(matcher)
    steps = 0
    while row.failure is None:
        spoil(matcher, row)
        assert row.is_ready and held(matcher, row, 0)
        take_all(matcher)
        steps += 1
    assert row.failure.code == "MATCHER_UNAVAILABLE"
    assert steps <= (MOST_REPLAYS + 1) * (MOST_MISSES + 2)
    assert other.is_ready and other.failure is None


def test_row_whose_mask_never_comes_is_replayed_and_fails_in_the_end() -> None:
    """The process lives, and serves others."""
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, clock=lambda: now_s[0])
    row, other = open_row(matcher), open_row(matcher)
    take_all(matcher)
    matcher.prompt = False
    keep(row, A)
    assert held(matcher, row, 1)
    replays = []
    while row.failure is None:
        now_s[0] += 0.5
        take_all(matcher)
        for frame in list(matcher.link.unheard):
            if frame.generation == row.generation and frame.kind is MatcherFrameKind.OPEN:
                replays.append(now_s[0])
                matcher.link._tell(Frame.of(MatcherFrameKind.OPENED, row.generation, row.mask_slot, [1]))
                take_all(matcher)
                assert held(matcher, row, 1)
        matcher.link.unheard.clear()
    assert row.failure.code == "MATCHER_UNAVAILABLE" and len(replays) == MOST_REPLAYS
    assert OVERDUE_S < replays[0] <= OVERDUE_S + 1 and now_s[0] < 20 * OVERDUE_S
    assert other.is_ready and other.failure is None


@pytest.mark.parametrize("others", [False, True])
def test_row_that_is_never_opened_fails_in_the_end(others: bool) -> None:
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, prompt=False, clock=lambda: now_s[0])
    row = open_row(matcher)
    while row.failure is None:
        now_s[0] += 1.0
        if others:
            other = open_row(matcher)
            matcher.link._tell(Frame.of(MatcherFrameKind.OPENED, other.generation, other.mask_slot, [1]))
        take_all(matcher)
        if others:
            matcher.client.close_sequence(other)
    assert row.failure.code == "MATCHER_UNAVAILABLE"
    limit_s = MOST_WAIT_S if others else SILENT_S
    assert limit_s < now_s[0] <= limit_s + 2


def test_row_that_is_given_up_before_its_opening_is_not_opened_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_worker.matcher.matcher_client.MOST_OPENING_BYTES", 1)
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, prompt=False, clock=lambda: now_s[0])
    first, second = open_row(matcher), open_row(matcher)
    now_s[0] = SILENT_S + 1.0
    take_all(matcher)
    assert first.failure is not None and second.failure is not None
    matcher.prompt = True
    matcher.on_send(matcher.link)
    take_all(matcher)
    matcher.client.close_sequence(first)
    assert opened(matcher) == [first.generation]


def test_row_that_has_failed_is_not_ready_if_its_opening_ends_late() -> None:
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, prompt=False, clock=lambda: now_s[0])
    row = open_row(matcher)
    now_s[0] = SILENT_S + 1.0
    take_all(matcher)
    assert row.failure is not None
    matcher.prompt = True
    matcher.on_send(matcher.link)  # the process answers OPENED
    take_all(matcher)
    assert opened(matcher) == [row.generation] and not row.is_open and not row.is_ready


@pytest.mark.parametrize("kind", [MatcherFrameKind.FAILED, MatcherFrameKind.TOO_SLOW], ids=["failed", "too slow"])
def test_row_that_was_given_up_keeps_its_error_if_the_process_fails_it_late(kind: MatcherFrameKind) -> None:
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, prompt=False, clock=lambda: now_s[0])
    row = open_row(matcher)
    now_s[0] = SILENT_S + 1.0
    take_all(matcher)
    error, failures = row.failure, sample("grammar_failures_total")
    assert error is not None
    matcher.link._tell(Frame(kind, row.generation, row.mask_slot, b"late"))
    take_all(matcher)
    assert row.failure is error and sample("grammar_failures_total") == failures


def test_masks_that_no_row_awaits_are_signs_of_life() -> None:
    """A sequence waits longer than a process may be silent, and all the time another one gets its masks at once."""
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, clock=lambda: now_s[0])
    served = open_row(matcher, text="start: /[A-D]+/")
    take_all(matcher)
    matcher.on_send = lambda _: None
    row = open_row(matcher)
    late = matcher.link.unheard.popleft()
    matcher.on_send = matcher._hear
    while now_s[0] < 3 * SILENT_S:
        now_s[0] += 1.0
        keep(served, A)
        take_all(matcher)
        assert row.failure is None
    matcher.link.unheard.append(late)
    matcher.on_send(matcher.link)
    take_all(matcher)
    assert row.is_ready


def test_row_that_waits_for_a_mask_slot_or_for_credit_does_not_fail() -> None:
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, 1, clock=lambda: now_s[0])
    assigned, waiting = open_row(matcher), open_row(matcher)
    take_all(matcher)
    now_s[0] = 2 * MOST_WAIT_S
    take_all(matcher)
    assert assigned.failure is None and waiting.failure is None and assigned.is_ready
    matcher.client.close_sequence(assigned)
    take_all(matcher)
    assert waiting.is_ready


def test_row_that_ends_while_its_mask_is_overdue_is_not_opened_again() -> None:
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, clock=lambda: now_s[0])
    row = open_row(matcher)
    take_all(matcher)
    matcher.prompt = False
    keep(row, A)
    assert held(matcher, row, 1)
    now_s[0] = 20.0
    matcher.client.close_sequence(row)
    matcher.prompt = True
    matcher.on_send(matcher.link)
    take_all(matcher)
    assert opened(matcher) == [row.generation]


def sample(name: str) -> float:
    return metrics.registry.get_sample_value(f"quire_worker_{name}") or 0.0


def test_metrics_tell_how_long_first_masks_take_from_the_start_of_their_sequences() -> None:
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, 1, prompt=False, clock=lambda: now_s[0])
    count, seconds = sample("first_mask_seconds_count"), sample("first_mask_seconds_sum")
    slots, waiting = sample("constrained_slots"), sample("constrained_waiting")
    first, second = open_row(matcher), open_row(matcher)
    assert (sample("constrained_slots") - slots, sample("constrained_waiting") - waiting) == (1, 1)
    now_s[0] = 2.0
    matcher.prompt = True
    matcher.on_send(matcher.link)
    take_all(matcher)
    assert sample("first_mask_seconds_count") - count == 1 and sample("first_mask_seconds_sum") - seconds == 2.0
    now_s[0] = 3.0
    matcher.link.lose()  # the replay is no first mask
    take_all(matcher)
    assert first.is_ready and sample("first_mask_seconds_count") - count == 1
    now_s[0] = 7.0
    matcher.client.close_sequence(first)  # the second has waited for a mask slot since it began
    take_all(matcher)
    assert second.is_ready and sample("first_mask_seconds_sum") - seconds == 9.0
    assert (sample("constrained_slots") - slots, sample("constrained_waiting") - waiting) == (1, 0)
    matcher.client.close()
    assert sample("constrained_slots") == slots


def test_metrics_count_the_replays_of_masks_that_did_not_come() -> None:
    matcher = a_matcher()
    row, before = open_row(matcher), sample("mask_replays_total")
    take_all(matcher)
    spoil(matcher, row)
    while allowed(row, 0) is None:
        assert held(matcher, row, 0)
        take_all(matcher)
    assert sample("mask_replays_total") == before + 1


def test_metrics_of_masks_are_updated_several_times_a_second_and_not_at_each_poll() -> None:
    """A step with grammars polls each of up to eight processes twice."""
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, 1, clock=lambda: now_s[0])
    row = open_row(matcher)
    take_all(matcher)
    masks = sample("masks_total")
    now_s[0] = 1.0
    matcher.client.poll()
    keep(row, A)
    assert matcher.client.mask_totals[0] == 1
    matcher.client.poll()
    assert sample("masks_total") == masks
    now_s[0] = 1.3
    matcher.client.poll()
    assert sample("masks_total") == masks + 1

"""Processes of the matcher that are lost: which grammar is to blame, and which sequences go on."""

from __future__ import annotations

import numpy as np

from quire_common.sequence import Sequence, Stop
from quire_common.structured.constraint import Constraint
from quire_worker.engine.slots import SlotTable
from quire_worker.matcher.constrained_slots import ConstrainedSlots
from quire_worker.matcher.crash_record import REFUSED_S, CrashRecord
from quire_worker.matcher.mask_waits import MOST_WAIT_S, SILENT_S
from quire_worker.matcher.matcher_client import MOST_LOST
from quire_worker.matcher.wire import MatcherFrameKind, unpack_open
from tests.fakes.worker.engine_bench import small_spec
from tests.fakes.worker.local_matcher import CrashingBackend, LocalMatcher
from tests.unit.worker.matcher.letter_rows import (
    BACKEND,
    PROMPT,
    TEXT,
    VOCAB,
    A,
    B,
    C,
    a_matcher,
    allowed,
    keep,
    open_row,
    opened,
    take_all,
    wanted,
)


def test_grammar_that_ends_the_process_twice_fails_alone() -> None:
    matcher = a_matcher()
    rows = [open_row(matcher), open_row(matcher, text="start: /[A-D]{4,8}/"), open_row(matcher)]
    guilty = rows[1]
    matcher.prompt = False
    matcher.link.lose([guilty.generation])
    matcher.client.poll()
    assert opened(matcher)[3:] == []
    while matcher.link.unheard and matcher.link.unheard[0].generation != guilty.generation:
        matcher.link.hear()
        matcher.client.poll()
    assert opened(matcher)[3:] == [rows[0].generation, rows[2].generation] and len(matcher.link.unheard) == 1
    matcher.link.lose([guilty.generation])
    matcher.client.poll()
    assert guilty.failure is not None and guilty.failure.code == "GRAMMAR_CRASHED"
    while matcher.link.hear():
        matcher.client.poll()
    assert [row.failure is None and row.is_open for row in rows] == [True, False, True]


DEADLY = "start: deadly\ndeadly: /[A-D]{3,8}/"


def test_requests_for_one_deadly_grammar_end_the_process_twice_and_not_once_each() -> None:
    now_s = [0.0]
    matcher = LocalMatcher(CrashingBackend.like(BACKEND), VOCAB, 24, clock=lambda: now_s[0])
    innocents = [open_row(matcher) for _ in range(8)]
    deadly = [open_row(matcher, text=DEADLY) for _ in range(8)]
    take_all(matcher)
    assert [row.failure is not None and row.failure.code for row in deadly] == ["GRAMMAR_CRASHED"] * 8
    assert all(row.is_open and row.failure is None for row in innocents)
    assert matcher.link.losses == 2
    later, other = open_row(matcher, text=DEADLY), open_row(matcher)
    take_all(matcher)
    assert later.failure is not None and other.is_open and matcher.link.losses == 2
    now_s[0] = REFUSED_S + 1  # by now the cause may be gone
    again = open_row(matcher, text=DEADLY)
    take_all(matcher)
    assert again.failure is not None and matcher.link.losses == 4
    assert all(row.is_open and row.failure is None for row in [*innocents, other])


def test_record_whose_refusals_are_over_has_nothing_to_ask_for() -> None:
    """A sequence's state is a digest of all its tokens: nobody computes it for nothing."""
    now_s = [0.0]
    record = CrashRecord(lambda: now_s[0])
    for state, at_s in ((b"a", 0.0), (b"b", REFUSED_S / 2)):
        now_s[0] = at_s
        record.add_crash(state)
        record.add_crash(state)
    now_s[0] = REFUSED_S + 1
    assert not record.is_refused(b"a") and record.is_refused(b"b") and record
    now_s[0] = 2 * REFUSED_S
    assert not record.is_refused(b"c") and not record


def test_process_that_others_end_is_not_blamed_on_the_sequence_that_it_worked_on() -> None:
    """The process opened that sequence between the two losses: its grammar did no harm."""
    matcher = a_matcher()
    row = open_row(matcher)
    for _ in range(3):
        matcher.link.lose([row.generation])
        take_all(matcher)
        assert row.is_open
    assert row.failure is None


def test_sequence_that_goes_on_between_two_crashes_is_not_blamed_twice() -> None:
    matcher = a_matcher()
    row = open_row(matcher)
    for token in (A, B, C):
        matcher.link.lose([row.generation])
        matcher.client.poll()
        keep(row, token)
    assert row.failure is None and allowed(row, 3) == wanted(A, B, C)


def test_of_two_suspects_none_is_blamed_and_each_is_tried_alone() -> None:
    matcher = a_matcher()
    innocent, guilty, other = (open_row(matcher) for _ in range(3))
    for _ in range(3):
        matcher.link.lose([innocent.generation, guilty.generation])
        matcher.client.poll()
    assert innocent.failure is None and guilty.failure is None
    matcher.prompt = False
    matcher.link.lose([innocent.generation, guilty.generation])
    before = len(matcher.link.heard)
    matcher.client.poll()
    # Nothing else reaches the process while it opens a suspect, so that the suspect alone can have crashed it.
    while matcher.link.unheard:
        if len(other.output) < 3:
            keep(other, A)
        matcher.link.hear()
        matcher.client.poll()
    kinds = [(frame.kind, frame.generation) for frame in matcher.link.heard[before:]]
    opens = [place for place, (kind, _) in enumerate(kinds) if kind is MatcherFrameKind.OPEN]
    assert [kinds[place][1] for place in opens] == [other.generation, innocent.generation, guilty.generation]
    assert all(row.is_open for row in (innocent, guilty, other))
    assert allowed(other, len(other.output)) == wanted(*other.output)


def test_suspects_stay_suspects_until_they_are_open() -> None:
    """Else two pairs of sequences, one of each deadly, would end one process after the other, and none be blamed."""
    matcher = a_matcher()
    first, second = [open_row(matcher) for _ in range(2)], [open_row(matcher) for _ in range(2)]
    matcher.prompt = False
    for pair in (first, second):
        matcher.link.lose([row.generation for row in pair])
        matcher.client.poll()
    order = [row.generation for row in (*first, *second)]
    for index, generation in enumerate(order):
        assert [frame.generation for frame in matcher.link.unheard] == [generation], "each is opened alone"
        if index == 1:  # somebody else ends the process before it has begun
            matcher.link.lose()
            matcher.client.poll()
            assert [frame.generation for frame in matcher.link.unheard] == [order[0]]
            matcher.link.hear()
            matcher.client.poll()
            assert [frame.generation for frame in matcher.link.unheard] == [generation]
        matcher.link.hear()
        matcher.client.poll()
    assert all(row.is_open for row in (*first, *second))


def test_process_that_never_comes_up_ends_the_sequences_that_wait_for_it() -> None:
    """Its tokenizer may be one that the process cannot read: nobody waits for ever."""
    matcher = a_matcher(prompt=False)
    row = open_row(matcher)
    for _ in range(MOST_LOST):
        assert row.failure is None
        matcher.link.lose()
        matcher.client.poll()
    assert row.failure is not None and row.failure.code == "MATCHER_UNAVAILABLE"
    matcher.client.close_sequence(row)
    matcher.prompt = True
    later = open_row(matcher)
    matcher.client.poll()
    assert later.is_open and later.failure is None


def test_failed_starts_do_not_count_as_lost_processes() -> None:
    """The system may refuse a process for half a minute. The sequence waits for the next one, but not for ever."""
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, prompt=False, clock=lambda: now_s[0])
    row = open_row(matcher)
    for _ in range(2 * MOST_LOST):
        matcher.link.lose(had_process=False)
        matcher.client.poll()
    assert row.failure is None and matcher.clients[0].was_just_lost
    now_s[0] = SILENT_S + 1.0
    matcher.client.poll()
    assert row.failure is not None and row.failure.code == "MATCHER_UNAVAILABLE"


def test_row_that_has_waited_for_credit_outlives_the_process() -> None:
    """While its mask was there, it waited for no mask. The next process has as much time as any to open it."""
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, clock=lambda: now_s[0])
    rows = [open_row(matcher), open_row(matcher, text="start: /[A-D]{4,8}/")]
    take_all(matcher)
    matcher.prompt = False
    for _ in range(2):
        now_s[0] += 2 * MOST_WAIT_S
        matcher.link.lose()
        take_all(matcher)
        now_s[0] += SILENT_S / 4
        take_all(matcher)
        assert not any(row.failure or row.is_ready for row in rows)
        while matcher.link.hear():
            take_all(matcher)
        assert all(row.is_ready for row in rows)
    matcher.link.lose()
    take_all(matcher)
    now_s[0] += SILENT_S + 1.0
    take_all(matcher)
    assert all(row.failure is not None and row.failure.code == "MATCHER_UNAVAILABLE" for row in rows)


def test_suspects_are_tried_while_new_sequences_arrive() -> None:
    """Before one is open, the next arrives, so that the process always opens some sequence."""
    matcher = a_matcher()
    suspects = [open_row(matcher) for _ in range(2)]
    take_all(matcher)
    matcher.prompt = False
    matcher.link.lose([row.generation for row in suspects])
    current, served = open_row(matcher), 0
    assert matcher.client.poll() and not any(row.is_ready for row in suspects)
    while not all(row.is_ready for row in suspects):
        assert served < 10
        following = open_row(matcher)
        while not current.is_ready:
            assert matcher.link.hear() or matcher.client.poll()
            matcher.client.poll()
        matcher.client.close_sequence(current)
        current, served = following, served + 1
    assert all(row.failure is None for row in suspects)


def test_losses_for_which_no_sequence_waits_do_not_fail_the_next_one() -> None:
    """As where the machine ends the process again and again while no request has a grammar."""
    matcher = a_matcher()
    slots = ConstrainedSlots(SlotTable(small_spec()), matcher.client)
    slots.start(0, Sequence(np.zeros(PROMPT, np.int32), Stop(20), constraint=Constraint.of(TEXT)))
    slots.end(0)
    for _ in range(MOST_LOST):
        matcher.link.lose()
        assert slots.poll_failures() == []
    matcher.prompt = False
    row = open_row(matcher)
    matcher.link.lose()
    take_all(matcher)
    assert row.failure is None
    while matcher.link.hear():
        take_all(matcher)
    assert row.is_ready


def opened_with(matcher: LocalMatcher, process: int = 0) -> dict[int, int]:
    """The lookahead of each sequence when the process was last asked to open it."""
    frames = [frame for frame in matcher.links[process].heard if frame.kind is MatcherFrameKind.OPEN]
    return {frame.generation: unpack_open(frame).lookahead for frame in frames}


def test_grammar_on_which_a_lost_process_worked_gets_no_lookahead() -> None:
    """The process may have crashed while it computed a lookahead mask, of which the replay key says nothing."""
    matcher = LocalMatcher(BACKEND, VOCAB, row_tokens=4)
    busy, same, other = open_row(matcher), open_row(matcher), open_row(matcher, text="start: /[A-D]{4,8}/")
    assert opened_with(matcher) == dict.fromkeys((busy.generation, same.generation, other.generation), 7)
    matcher.link.lose([busy.generation])
    take_all(matcher)
    assert opened_with(matcher) == {busy.generation: 0, same.generation: 0, other.generation: 7}
    later = open_row(matcher)
    assert opened_with(matcher)[later.generation] == 0
    take_all(matcher)
    assert all(row.is_ready for row in (busy, same, other, later))


def test_no_process_looks_ahead_for_a_grammar_on_which_another_one_was_lost() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, processes=2, row_tokens=4)
    rows = [open_row(matcher) for _ in range(2)]
    matcher.links[0].lose([rows[0].generation])
    take_all(matcher)
    later = [open_row(matcher) for _ in range(2)]
    others = [open_row(matcher, text="start: /[A-D]{4,8}/") for _ in range(2)]
    for row in [*later, *others]:
        process = matcher.clients.index(row.mask_source)  # type: ignore[arg-type]  # each source is a client
        assert opened_with(matcher, process)[row.generation] == (0 if row in later else 7)


def test_loss_of_an_idle_process_forbids_no_lookahead() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, row_tokens=4)
    row = open_row(matcher)
    matcher.link.lose()
    take_all(matcher)
    assert opened_with(matcher) == {row.generation: 7}


def test_crash_of_lookahead_only_delays_a_sequence_that_ends_before() -> None:
    """The grammar crashes the process at its third token, and the sequence never samples so many tokens."""
    matcher = LocalMatcher(CrashingBackend.like(BACKEND), VOCAB, row_tokens=4)
    row = open_row(matcher, text='start: fatal\nfatal: "ABCD"')
    take_all(matcher)
    assert matcher.link.losses == 1 and row.failure is None and row.is_ready
    keep(row, A, B)
    assert matcher.link.losses == 1 and allowed(row, 2) == [C]


def test_record_forgets_the_oldest_grammars_without_lookahead() -> None:
    record = CrashRecord(lambda: 0.0)
    for number in range(300):
        record.forbid_lookahead(f"start: /A{{{number}}}/")
    assert record.allows_lookahead("start: /A{0}/") and not record.allows_lookahead("start: /A{299}/")
    assert not record, "no replay key is suspect"

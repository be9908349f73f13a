"""Several processes of the matcher: how sequences are spread over them, and how little one of them harms the others."""

from __future__ import annotations

import pytest

from quire_common.telemetry import metrics
from quire_worker.matcher.matcher_client import RECOVERY_S, MatcherClient
from quire_worker.matcher.wire import MatcherFrameKind
from tests.fakes.worker.local_matcher import CrashingBackend, LocalMatcher
from tests.unit.worker.matcher.letter_rows import BACKEND, VOCAB, A, allowed, keep, open_row, take_all, wanted

DEADLY = "start: deadly\ndeadly: /[A-D]{3,8}/"


def constrained_slots() -> float | None:
    return metrics.registry.get_sample_value("quire_worker_constrained_slots")


def test_each_sequence_goes_to_the_process_that_has_the_fewest() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, 9, processes=3)
    before = constrained_slots() or 0.0
    rows = [open_row(matcher) for _ in range(7)]
    assert [client.sequences for client in matcher.clients] == [3, 2, 2] and constrained_slots() == before + 7
    assert sorted(row.mask_slot for row in rows) == [0, 1, 2, 3, 4, 5, 6]
    for row in rows[:4:3]:
        matcher.client.close_sequence(row)
    open_row(matcher)
    assert [client.sequences for client in matcher.clients] == [2, 2, 2] and constrained_slots() == before + 6


def test_all_processes_start_with_the_first_sequence() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, processes=3)
    assert not matcher.links
    open_row(matcher)
    assert len(matcher.links) == 3


def test_a_lost_process_delays_its_own_sequences_alone() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, processes=2)
    rows = [open_row(matcher) for _ in range(4)]
    take_all(matcher)
    matcher.prompt = False
    matcher.links[1].lose()
    matcher.client.poll()
    assert [row.is_open for row in rows] == [True, False, True, False]
    matcher.prompt = True
    keep(rows[0], A)
    assert allowed(rows[0], 1) == wanted(A)
    matcher.links[1].hear()
    matcher.links[1].hear()
    take_all(matcher)
    assert all(row.is_open for row in rows) and [link.losses for link in matcher.links] == [0, 1]


def test_what_ended_one_process_twice_ends_no_other() -> None:
    matcher = LocalMatcher(CrashingBackend.like(BACKEND), VOCAB, 9, processes=3)
    rows = [open_row(matcher, text=DEADLY) for _ in range(6)]
    take_all(matcher)
    assert all(row.failure is not None and row.failure.code == "GRAMMAR_CRASHED" for row in rows)
    assert sum(link.losses for link in matcher.links) <= 2 + len(matcher.links)
    before = [link.losses for link in matcher.links]
    later = open_row(matcher, text=DEADLY)
    take_all(matcher)
    assert later.failure is not None and [link.losses for link in matcher.links] == before


def test_masks_are_counted_over_all_processes() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, processes=2)
    rows = [open_row(matcher) for _ in range(4)]
    take_all(matcher)
    for row in rows:
        keep(row, A)
    assert matcher.client.mask_totals[0] == 4
    kinds = [[frame.kind for frame in link.heard].count(MatcherFrameKind.TOKENS) for link in matcher.links]
    assert kinds == [2, 2]


def test_one_event_that_ends_two_processes_refuses_no_grammar() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, 8, processes=2)
    rows = [open_row(matcher) for _ in range(2)]
    take_all(matcher)
    for link, row in zip(matcher.links, rows, strict=True):
        link.lose([row.generation])
    take_all(matcher)
    assert all(row.is_open and row.failure is None for row in rows)


def test_sequence_that_waits_gets_the_free_mask_slot_of_another_process() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, 2, processes=2)
    first, second, third = (open_row(matcher) for _ in range(3))
    take_all(matcher)
    assert [row.is_open for row in (first, second, third)] == [True, True, False]
    assert third.mask_source is first.mask_source
    matcher.client.close_sequence(second)
    take_all(matcher)
    assert third.is_open and third.mask_slot == 1 and third.mask_source is not first.mask_source
    keep(third, A)
    assert allowed(third, 1) == wanted(A)
    for row in (first, third):
        matcher.client.close_sequence(row)
    assert not matcher.sequences


def test_process_that_was_just_lost_gets_no_new_sequence_while_others_live() -> None:
    now_s = [0.0]
    matcher = LocalMatcher(BACKEND, VOCAB, 8, processes=2, clock=lambda: now_s[0])
    kept = open_row(matcher)
    take_all(matcher)
    matcher.links[1].lose()
    take_all(matcher)
    assert open_row(matcher).mask_source is kept.mask_source
    now_s[0] += RECOVERY_S
    assert open_row(matcher).mask_source is not kept.mask_source


def test_processes_are_polled_only_with_a_sequence_or_after_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most steps have no grammar, and a worker with a GPU has eight processes."""
    matcher, polled, poll = LocalMatcher(BACKEND, VOCAB, processes=2), list[int](), MatcherClient.poll

    def counted(client: MatcherClient) -> bool:
        polled.append(matcher.clients.index(client))
        return poll(client)

    monkeypatch.setattr(MatcherClient, "poll", counted)
    assert not matcher.client.poll() and not polled
    row = open_row(matcher)
    take_all(matcher)
    assert polled
    matcher.client.close_sequence(row)
    matcher.client.poll()
    polled.clear()
    matcher.client.poll()
    assert not polled
    woken: list[bool] = []
    matcher.client.wake = lambda: woken.append(True)
    matcher.links[1].lose()
    matcher.client.poll()
    assert woken and polled == [0, 1] and matcher.clients[1].was_just_lost
    matcher.client.poll()
    assert polled == [0, 1], "no message has come since"

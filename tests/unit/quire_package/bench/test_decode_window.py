"""The time per token of steps in which everybody decodes, out of stamps of events that may carry several tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from quire.bench.decode_window import decode_window
from quire.bench.outcome import Outcome
from quire.bench.serving_report import ReportOptions, make_report, render_report

STEP_S, PROMPT_STEP_S, FEW_S = 0.01, 0.2, 0.004


def wave(begins: Sequence[int], tokens: int, joined: float, seed: int = 0, at_s: float = 0.0) -> list[Outcome]:
    """Requests that are sent at once, each of whose first tokens is of the step given, and whose events are joined with
    the next with some likelihood. Steps with a prompt are slow, those of fewer requests than all are fast."""
    numbers, times, now_s = random.Random(seed), [], at_s
    for step in range(max(begins) + tokens):
        decoding = sum(begin < step < begin + tokens for begin in begins)
        now_s += PROMPT_STEP_S if step <= max(begins) else STEP_S if decoding == len(begins) else FEW_S
        times.append(now_s)
    return [outcome_of(at_s, times[begin : begin + tokens], numbers, joined) for begin in begins]


def outcome_of(sent_s: float, times: Sequence[float], numbers: random.Random, joined: float) -> Outcome:
    """The first and the last token have events of their own."""
    ends = [0, *(place for place in range(1, len(times) - 1) if numbers.random() >= joined), len(times) - 1]
    stamps = [times[end] for end in ends]
    counts = [1, *(b - a for a, b in itertools.pairwise(ends))]
    gaps = [b - a for a, b in itertools.pairwise(stamps)]
    return Outcome(0, sent_s, stamps[0], stamps[-1], len(ends), gaps, 8, len(times), told_tokens=counts)


@pytest.mark.parametrize("joined", [0.0, 0.3, 0.8])
def test_only_steps_in_which_all_decode_count(joined: float) -> None:
    done = wave([0, 0, 1, 3, 3, 5], 40, joined)
    window = decode_window(done)
    assert window.concurrency == 6 and window.seconds == pytest.approx(34 * STEP_S)
    assert window.per_token_s == pytest.approx([STEP_S] * 6)
    assert max(each.tpot_s for each in done) > 2 * STEP_S


def test_requests_one_after_the_other_have_the_time_per_token() -> None:
    done = [outcome for at in range(3) for outcome in wave([0], 20, 0.5, seed=at, at_s=10.0 * at)]
    window = decode_window(done)
    assert window.concurrency == 1 and window.seconds == pytest.approx(3 * 19 * STEP_S)
    assert window.per_token_s == pytest.approx([each.tpot_s for each in done])


def test_spans_are_cut_where_somebody_waits() -> None:
    """The second wave is sent while the first one decodes: until all of it decodes nothing counts, and nothing after
    the first end."""
    first, second = wave([0, 0], 100, 0.3), wave([0, 1, 1], 30, 0.3, at_s=0.5)
    window = decode_window([*first, *second])
    assert window.concurrency == 5
    begin, end = max(each.first_s for each in second), min(each.last_s for each in (*first, *second))
    assert window.seconds == pytest.approx(end - begin) and window.per_token_s == pytest.approx([STEP_S] * 5)


def test_what_events_do_not_tell_is_not_guessed() -> None:
    joined, whole = wave([0, 0], 30, 0.5)[0], wave([0, 0], 30, 0.0, seed=1)[1]
    for each in (joined, whole):
        each.told_tokens = []
    assert decode_window([joined, whole]).per_token_s == pytest.approx([STEP_S]), "an event a token needs no telling"
    joined.told_tokens = [1] * joined.frames
    assert joined.event_tokens is None, "that is not what usage says"
    options = ReportOptions(("tpot", "decode_tpot"), (50,))
    report = make_report([joined], 0.0, options)
    assert "median_decode_tpot_ms" not in report and report["decode_window_concurrency"] == 1
    assert "Median DECODE_TPOT (ms):                 unknown" in render_report(report, options)
    report = make_report([whole], 0.0, options)
    assert report["median_decode_tpot_ms"] == pytest.approx(1000 * STEP_S)
    assert "Median DECODE_TPOT (ms):                 10.00" in render_report(report, options)


def test_nothing_decodes_where_nothing_was_answered() -> None:
    assert decode_window([]).concurrency == 0
    assert decode_window([Outcome(0, 0.0, 1.0, 1.0, 1, [], 8, 1)]).per_token_s == []

"""What `bench.overload` makes of its requests' outcomes: figures of a stream, and which requirements held."""

from __future__ import annotations

from argparse import Namespace

from bench.overload.__main__ import Found, capacity, judge, show
from bench.overload.load import Heard
from quire.bench.outcome import Outcome

OPTIONS = Namespace(rows=10, step_ms=100.0, tokens=10)


def admitted(sent_s: float, ttft_s: float, tokens: int = 10) -> Outcome:
    last_s = sent_s + ttft_s + 1.0
    first_s = sent_s + ttft_s
    return Outcome(0, sent_s, first_s, last_s, tokens, [0.5, 0.5], output_tokens=tokens, ended_s=last_s)


def refused(sent_s: float, error: str = "HTTP 429: full", after_s: float = 0.01) -> Outcome:
    return Outcome(0, sent_s, ended_s=sent_s + after_s, error=error)


def heard(*outcomes: Outcome) -> Heard:
    return Heard(100.0, 110.0, list(outcomes))


def test_figures_of_a_stream() -> None:
    stream = heard(
        admitted(100.0, 0.1),
        admitted(101.0, 0.3),
        admitted(109.5, 0.1),  # ends after the stream
        refused(102.0),
        refused(103.0, "HTTP 503: none", 0.03),
        refused(104.0, "HTTP 400: bad"),
        refused(105.0, "connection lost: 429"),
    )
    assert (len(stream.admitted), len(stream.refused)) == (3, 2)
    assert stream.refused_share == 2 / 7
    assert stream.failures == ["HTTP 400: bad", "connection lost: 429"]
    assert round(stream.first_token_ms(100)) == 300 and round(stream.first_gap_ms(50)) == 500
    assert round(stream.refusal_ms(100)) == 30
    assert stream.tokens_per_s() == 2.0
    assert heard(admitted(100.0, 0.1)).recovery_s(200.0) == 0.0


def test_recovery_ends_with_the_last_second_of_which_more_than_a_fifth_was_refused_or_late() -> None:
    assert heard(admitted(100.5, 0.3), admitted(101.0, 0.1)).recovery_s(200.0) == 1.0
    assert heard(refused(100.5), refused(103.9)).recovery_s(200.0) == 4.0
    in_time = [admitted(103.0 + number / 10, 0.1) for number in range(4)]
    assert heard(refused(100.5), *in_time, refused(103.9)).recovery_s(200.0) == 1.0
    assert heard(refused(100.5), *in_time, refused(103.8), refused(103.9)).recovery_s(200.0) == 4.0


def test_each_requirement_is_judged_by_its_own_figure() -> None:
    calm, slow = heard(admitted(100.0, 0.1)), heard(admitted(100.0, 0.16))
    full = heard(*[admitted(100.0, 0.1, 1000)])
    assert capacity(OPTIONS) == 10.0

    def missed(cores: float = 0.5, **changed: Heard) -> list[int]:
        streams = {
            "calm": calm,
            "overload": full,
            "overload: after": calm,
            "alone: others": calm,
            "limited: others": calm,
            "unlimited: others": heard(*slow.outcomes, refused(100.0)),
        }
        streams |= {name.replace("_", ": "): stream for name, stream in changed.items()}
        found = Found(streams, {"router": cores})
        assert len(show(found).splitlines()) >= len(streams)
        return [number for number, (_, held) in enumerate(judge(OPTIONS, found)) if not held]

    assert missed() == []
    assert missed(overload=heard(admitted(100.0, 0.16, 1000))) == [0]
    assert missed(overload=calm) == [1]
    assert missed(overload=heard(*full.outcomes, refused(100.0, after_s=0.2))) == [2]
    assert missed(calm=heard(*calm.outcomes, refused(100.0, "HTTP 500: internal"))) == [3]
    assert missed(overload_after=heard(refused(103.0))) == [4]
    assert missed(limited_others=slow) == [5]
    assert missed(limited_others=heard(*calm.outcomes, refused(100.0))) == [6]
    assert missed(unlimited_others=slow) == [7]
    assert missed(cores=0.7) == [8]

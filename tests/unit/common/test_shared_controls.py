"""Siblings repeat a request's controls on the wire: a process parses, checks and writes them once."""

from __future__ import annotations

import gc
import time
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from quire.v1 import common_pb2 as pb
from quire_common.errors import InvalidArgument
from quire_common.logit_controls import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    LogitControls,
    check_controls,
    check_vocabulary,
)
from quire_common.sequence import Sampling, Sequence, Stop, sampling_from_pb, sequence_from_pb, sequence_to_pb
from tests.cpu_time import least_cpu_s
from tests.fakes.scheduler.scheduler_rig import a_sequence

SIBLINGS = 64
WORD = tuple(range(1000, 1000 + MAX_BAD_WORD_TOKENS // MAX_BAD_WORDS))


def largest(number: int = 0) -> LogitControls:
    return LogitControls(
        presence_penalty=0.5,
        logit_bias=tuple((token, 1.0 + number) for token in range(MAX_BIASES)),
        allowed_token_ids=tuple(range(1000, 1000 + MAX_ALLOWED_TOKENS)),
        bad_words=(WORD,) * MAX_BAD_WORDS,
    )


def siblings(controls: LogitControls, count: int = SIBLINGS) -> list[Sequence]:
    base = a_sequence([5, 6])
    return [replace(base, sampling=Sampling(seed=7, sample=number, controls=controls)) for number in range(count)]


def received(count: int = SIBLINGS, controls: LogitControls | None = None) -> list[pb.SequenceSpec]:
    """Messages as a peer has them, which share nothing."""
    data = [sequence_to_pb(each).SerializeToString() for each in siblings(controls or largest(), count)]
    return [pb.SequenceSpec.FromString(each) for each in data]


def cpu_ms(act: Callable[[], object]) -> float:
    began = time.thread_time()
    act()
    return (time.thread_time() - began) * 1e3


ALONE = {
    "presence_penalty": LogitControls(presence_penalty=-0.5),
    "frequency_penalty": LogitControls(frequency_penalty=0.5),
    "repetition_penalty": LogitControls(repetition_penalty=1.25),
    "logit_bias": LogitControls(logit_bias=((7, 1.0),)),
    "allowed_token_ids": LogitControls(allowed_token_ids=(7,)),
    "bad_words": LogitControls(bad_words=((7,),)),
}


@pytest.mark.parametrize("name", [each.name for each in fields(LogitControls) if each.init])
def test_each_control_alone_comes_through(name: str) -> None:
    """Whether there are any is asked field by field."""
    (message,) = received(1, ALONE[name])
    assert sequence_from_pb(message).sampling.controls == ALONE[name]


def test_neutral_controls_are_none() -> None:
    (message,) = received(1, LogitControls())
    assert sequence_from_pb(message).sampling.controls is None


def test_siblings_share_one_object_and_keep_what_is_their_own() -> None:
    first, *rest = [sequence_from_pb(message) for message in received()]
    assert first.sampling.controls == largest()
    assert all(each.sampling.controls is first.sampling.controls for each in rest)
    assert [each.sampling.sample for each in (first, *rest)] == list(range(SIBLINGS))


def test_other_controls_are_another_object() -> None:
    first, second = (sequence_from_pb(received(1, largest(number))[0]) for number in (0, 1))
    assert (first.sampling.controls, second.sampling.controls) == (largest(0), largest(1))


def test_a_penalty_alone_makes_other_controls() -> None:
    harsher = replace(largest(), presence_penalty=1.5)
    first, second = (sequence_from_pb(received(1, controls)[0]) for controls in (largest(), harsher))
    assert (first.sampling.controls, second.sampling.controls) == (largest(), harsher)


def test_siblings_take_the_memory_of_one() -> None:
    messages = received()
    gc.collect()
    tracemalloc.start()
    try:
        kept = [sequence_from_pb(message) for message in messages]
        taken, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == SIBLINGS
    assert taken < 4 << 20, f"{taken / (1 << 20):.1f} MiB"  # some 2 MiB for one


def test_a_sibling_is_parsed_in_a_fraction_of_the_first_ones_time() -> None:
    others = [message for number in range(1, 9) for message in received(1, largest(number))]
    messages = received()
    kept = [sequence_from_pb(messages[0])]
    apart = cpu_ms(lambda: kept.extend(map(sequence_from_pb, others))) / len(others)
    sibling = cpu_ms(lambda: kept.extend(map(sequence_from_pb, messages[1:]))) / (SIBLINGS - 1)
    assert sibling < apart / 3, (sibling, apart)


def test_a_sibling_is_written_in_a_fraction_of_the_first_ones_time() -> None:
    first, *rest = siblings(largest())
    one = cpu_ms(lambda: sequence_to_pb(first))
    others = cpu_ms(lambda: [sequence_to_pb(each) for each in rest])
    assert others < 0.4 * one * len(rest), (one, others)


def test_a_sibling_is_checked_against_the_vocabulary_in_no_time() -> None:
    controls = largest()

    def check(times: int) -> None:
        for _ in range(times):
            check_vocabulary(controls, 1 << 20)

    one, again = cpu_ms(lambda: check(1)), cpu_ms(lambda: check(SIBLINGS))
    assert again < one * SIBLINGS / 4, (one, again)


def test_what_nobody_holds_any_more_is_forgotten() -> None:
    found = sequence_from_pb(received(1)[0])
    controls = found.sampling.controls
    assert controls is not None
    gone: list[int] = []
    weakref.finalize(controls, gone.append, 1)
    del found, controls
    gc.collect()
    assert gone


def test_bad_controls_are_refused_each_time() -> None:
    bad = replace(largest(), bad_words=((1,),) * (MAX_BAD_WORDS + 1))
    messages = received(2, bad)
    for message in messages:
        with pytest.raises(InvalidArgument, match="bad_words"):
            sequence_from_pb(message)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="allowed_token_ids"):
            check_vocabulary(largest(), MAX_ALLOWED_TOKENS)


def test_controls_that_are_replaced_are_checked_and_written_anew() -> None:
    good = largest()
    check_controls(good)
    sequence_to_pb(siblings(good, 1)[0])
    bad = replace(good, logit_bias=((1, 1000.0),))
    with pytest.raises(InvalidArgument, match="logit_bias"):
        check_controls(bad)
    other = replace(good, logit_bias=((1, 3.0),))
    assert sequence_from_pb(received(1, other)[0]).sampling.controls == other


def test_stop_and_other_fields_travel_with_shared_controls() -> None:
    sequence = replace(siblings(largest(), 1)[0], stop=Stop(9, stop_token_ids=(3,)))
    again = sequence_from_pb(pb.SequenceSpec.FromString(sequence_to_pb(sequence).SerializeToString()))
    assert (again.stop, again.sampling) == (sequence.stop, sequence.sampling)


@pytest.mark.parametrize(
    ("make_message", "param"),
    [
        (lambda: pb.SamplingParams(logit_bias=dict.fromkeys(range(300_000), 1.0)), "logit_bias"),
        (lambda: pb.SamplingParams(bad_words_ids=[b""] * 1_000_000), "bad_words"),
        (lambda: pb.SamplingParams(bad_words_ids=[b"\1\0\0\0" * 1_000_000]), "bad_words"),
        (lambda: pb.SamplingParams(allowed_token_ids=b"\1\0\0\0" * 1_000_000), "allowed_token_ids"),
        (lambda: pb.SamplingParams(logits_processors=[""] * 1_000_000), "logits_processors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lists_of_a_message_are_counted_before_they_are_made(
    make_message: Callable[[], pb.SamplingParams], param: str
) -> None:
    """A message of 4 MiB held up the router's event loop for 232 ms."""
    message = make_message()

    def convert() -> None:
        with pytest.raises(InvalidArgument) as caught:
            sampling_from_pb(message)
        assert (caught.value.code, caught.value.param) == ("TOO_MANY_ITEMS", param)

    assert least_cpu_s(convert) < 0.005

"""The credit codec: round trips, golden bytes, and refusal of columns that do not fit."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from quire.v1 import worker_pb2
from quire_common import credit
from quire_common.columns import pack_i32
from quire_common.errors import InvalidArgument, NotFound, Unsupported
from quire_common.logit_controls import LogitControls
from quire_common.repetition import RepetitionDetection
from quire_common.sequence import RequestContext, Sampling, Sequence, Stop, sequence_from_pb, sequence_to_pb
from quire_common.thinking import ThinkingBudget, check_thinking


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def assert_same(a: object, b: object) -> None:
    if isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            if field.compare:
                assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)  # type: ignore[arg-type]  # compared just before
        for x, y in zip(a, b, strict=True):  # type: ignore[call-overload]  # same length
            assert_same(x, y)
    elif isinstance(a, Exception):
        assert type(a) is type(b) and vars(a) == vars(b)
    else:
        assert a == b


def a_grant() -> credit.Grant:
    sequence = Sequence(
        ids(5, 6, 7),
        Stop(max_tokens=9, min_tokens=1, stop_token_ids=(3, 4), ignore_eos=True),
        Sampling(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**63 + 5, sample=2, logprobs=0),
        ids(11),
        "salt",
        True,
    )
    start = credit.Start(
        2, -(2**40), sequence, 16, (ids(4, 5), ids(9)), 64, RequestContext("r", 1, "t", priority=-2), 128
    )
    return credit.Grant(
        epoch=credit.Epoch(2**63 + 1, 3),
        seq=2**40,
        stop_slot=ids(1),
        stop_keep_pages=ids(2),
        start=[start],
        limit_slot=ids(1, 2),
        limit_position=ids(100, 200),
        grow_slot=ids(1),
        grow_group=ids(0),
        grow_page=ids(77),
        order_slot=ids(2, 1),
        move=[credit.PageMove(8, credit.MoveKind.LOAD, 0, ids(4), (b"h" * 32,), b"lease")],
        budget=credit.Budget(512, 128, 64, 2, 1),
    )


def a_report() -> credit.Report:
    logprobs = credit.LogprobColumns(
        ids(1), np.array([-0.5], np.float32), ids(1), ids(2), ids(8, 9), np.array([-0.5, -1], np.float32)
    )
    return credit.Report(
        epoch=credit.Epoch(1, 1),
        first_step=10,
        retired=4,
        in_flight=2,
        step_applied=np.array([3, 2**40], np.int64),
        step_rows=ids(1, 2),
        step_prefill_tokens=ids(0, 64),
        slot=ids(0, 1, 2),
        count=ids(1, 1, 0),
        token=ids(7, 8),
        finish=np.array([0, 1, 4], np.uint8),
        logprobs=logprobs,
        prefill_slot=ids(2),
        prefill_position=ids(64),
        moved_id=np.array([2**40], np.int64),
        moved_status=np.array([1], np.uint8),
        moved_pages=ids(3),
        moved_us=ids(250),
        running=3,
        spare=1,
        stalled_slot=ids(5),
        error=[(2, NotFound("X", "cause", "fix"))],
        timing=[credit.StepTiming(1, 2, 3, 4, 5)],
        grant_arrival_us=99,
    )


def test_grant_round_trip() -> None:
    grant = a_grant()
    wire = credit.encode_grant(grant).SerializeToString()
    assert_same(grant, credit.decode_grant(worker_pb2.Grant.FromString(wire)))


def test_report_round_trip() -> None:
    report = a_report()
    wire = credit.encode_report(report).SerializeToString()
    assert_same(report, credit.decode_report(worker_pb2.Report.FromString(wire)))


def test_golden_bytes() -> None:
    """The wire must not change by accident: an old scheduler may drive a new worker."""
    grant = credit.encode_grant(a_grant()).SerializeToString(deterministic=True)
    report = credit.encode_report(a_report()).SerializeToString(deterministic=True)
    assert hashlib.sha256(grant).hexdigest() == "862371ae367dd46167e3ef95bff8d0d25df4e2ea468c0103b250404f801b59f3"
    assert hashlib.sha256(report).hexdigest() == "9c6afb5e9e958fdbb5a145ebc005c693937412f460cba8e46b4b2a92928eae51"


def test_logprobs_of_prompts_travel_by_chunk() -> None:
    def chunk(owner: int, first: int, *tops: int) -> credit.PromptLogprobs:
        count, total = len(tops), sum(tops)
        values = np.arange(first, first + total, dtype=np.float32)
        columns = (np.linspace(-1, 0, count, dtype=np.float32), ids(*range(1, count + 1)), ids(*tops))
        return credit.PromptLogprobs(
            owner, first, credit.LogprobColumns(ids(*range(count)), *columns, ids(*range(total)), values)
        )

    report = credit.Report(credit.Epoch(1, 1), prompt_logprobs=[chunk(3, 1, 2, 0, 1), chunk(0, 70), chunk(9, 5, 1)])
    wire = credit.encode_report(report).SerializeToString()
    assert_same(report, credit.decode_report(worker_pb2.Report.FromString(wire)))
    message = credit.encode_report(report)
    message.prompt_logprobs.count = pack_i32([3, 0, 2])
    with pytest.raises(InvalidArgument):
        credit.decode_report(message)


def test_thinking_budget_round_trip() -> None:
    sequence = Sequence(ids(5), Stop(9), thinking=ThinkingBudget((7, 8), (9,), 0))
    assert_same(sequence, sequence_from_pb(sequence_to_pb(sequence)))
    assert sequence_from_pb(sequence_to_pb(Sequence(ids(5), Stop(9)))).thinking is None


@pytest.mark.parametrize("start, end", [((), (1,)), ((1,), ()), ((1,), (50,)), ((-1,), (1,)), ((1,) * 17, (2,))])
def test_impossible_thinking_marks_are_refused(start: tuple[int, ...], end: tuple[int, ...]) -> None:
    check_thinking(ThinkingBudget((1,), (49,), 3), vocab_size=50)
    with pytest.raises(InvalidArgument, match="marked by"):
        check_thinking(ThinkingBudget(start, end, 3), vocab_size=50)


def test_controls_round_trip_and_are_checked() -> None:
    controls = LogitControls(0.5, -0.25, 1.5, ((-1, 2.5), (7, -100.0)), (3, 1), ((4, 5), (6,)))
    rule = RepetitionDetection(9, 2, 3)
    sequence = Sequence(ids(5), Stop(9, repetition=rule), Sampling(controls=controls, prompt_logprobs=0))
    assert_same(sequence, sequence_from_pb(sequence_to_pb(sequence)))
    for wrong in ({"presence_penalty": 2.5}, {"repetition_penalty": 0.0}, {"bad_words": ((),)}):
        broken = dataclasses.replace(sequence, sampling=Sampling(controls=dataclasses.replace(controls, **wrong)))
        with pytest.raises(InvalidArgument) as caught:
            sequence_from_pb(sequence_to_pb(broken))
        assert caught.value.param == next(iter(wrong))


def test_unknown_columns_are_ignored() -> None:
    wire = credit.encode_grant(a_grant()).SerializeToString() + b"\x92\x3f\x04abcd"  # field 1010, four bytes
    assert_same(a_grant(), credit.decode_grant(worker_pb2.Grant.FromString(wire)))


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("stop_slot", pack_i32([1, 2, 3]), "UNEQUAL_COLUMNS"),
        ("limit_position", b"", "UNEQUAL_COLUMNS"),
        ("grow_page", b"abc", "BAD_COLUMN"),
    ],
)
def test_grant_refuses_bad_columns(field: str, value: bytes, code: str) -> None:
    message = credit.encode_grant(a_grant())
    setattr(message, field, value)
    with pytest.raises(InvalidArgument) as caught:
        credit.decode_grant(message)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("count", pack_i32([1, 1, 5]), "BAD_COUNTS"),
        ("count", pack_i32([3, -1, 0]), "BAD_COUNTS"),
        ("step_rows", pack_i32([1, 1]), "BAD_COUNTS"),
        ("finish", b"\0", "UNEQUAL_COLUMNS"),
        ("moved_status", b"", "UNEQUAL_COLUMNS"),
    ],
)
def test_report_refuses_bad_columns(field: str, value: bytes, code: str) -> None:
    message = credit.encode_report(a_report())
    setattr(message, field, value)
    with pytest.raises(InvalidArgument) as caught:
        credit.decode_report(message)
    assert caught.value.code == code


def test_unsupported_grant_controls_are_refused() -> None:
    message = credit.encode_grant(a_grant())
    message.control.add(kind=worker_pb2.Control.KIND_SLEEP)
    with pytest.raises(Unsupported):
        credit.decode_grant(message)


@pytest.mark.parametrize("us", [2**32 - 1, 2**32, 2**40, 2**63, -1])
def test_no_clock_value_makes_a_report_impossible_to_write(us: int) -> None:
    """An engine that had nothing to do for 71.6 minutes has waited 2^32 us."""
    report = credit.Report(credit.Epoch(1, 1), timing=[credit.StepTiming(us, us, us, us, us)])
    message = worker_pb2.Report.FromString(credit.encode_report(report).SerializeToString())
    expected = min(max(us, 0), 2**32 - 1)
    assert credit.decode_report(message).timing == [credit.StepTiming(*[expected] * 5)]


@pytest.mark.parametrize(
    "controls",
    [
        LogitControls(presence_penalty=0.5),
        LogitControls(frequency_penalty=0.5),
        LogitControls(repetition_penalty=1.5),
        LogitControls(logit_bias=((3, 1.0),)),
        LogitControls(allowed_token_ids=(3,)),
        LogitControls(bad_words=((3,),)),
    ],
    ids=lambda controls: next(f.name for f in dataclasses.fields(controls) if f.init and getattr(controls, f.name)),
)
def test_each_logit_control_round_trips_alone(controls: LogitControls) -> None:
    sequence = Sequence(ids(1), Stop(1), Sampling(controls=controls))
    assert sequence_from_pb(sequence_to_pb(sequence)).sampling.controls == controls
    assert sum(field.init for field in dataclasses.fields(controls)) == 6, "a new control belongs into this list"


GROUPS = {
    "Report.step": ("step_applied", "step_rows", "step_prefill_tokens"),
    "Report.row": ("slot", "count", "finish"),
    "Report.prefill": ("prefill_slot", "prefill_position"),
    "Report.moved": ("moved_id", "moved_status", "moved_pages", "moved_us"),
    "Grant.stop": ("stop_slot", "stop_keep_pages"),
    "Grant.limit": ("limit_slot", "limit_position"),
    "Grant.grow": ("grow_slot", "grow_group", "grow_page"),
}


@pytest.mark.parametrize(("group", "column"), [(group, name) for group, names in GROUPS.items() for name in names])
def test_partial_column_group_is_refused(group: str, column: str) -> None:
    """Whichever column it is: a sender must not leave out what it was given."""
    value = np.zeros(2, np.uint8 if column in ("finish", "moved_status") else np.int32)
    with pytest.raises(InvalidArgument):
        if group.startswith("Report"):
            report = credit.Report(credit.Epoch(1, 1))
            setattr(report, column, value)
            credit.decode_report(credit.encode_report(report))
        else:
            grant = credit.Grant(credit.Epoch(1, 1), 1)
            setattr(grant, column, value)
            credit.decode_grant(credit.encode_grant(grant))

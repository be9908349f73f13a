"""The table of request parameters: what is written from it is up to date, and what names a parameter agrees with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quire import SamplingParams
from quire.v1 import common_pb2 as pb
from quire.v1 import inference_pb2
from quire_common.errors import InvalidArgument
from quire_common.logit_controls import NEUTRAL
from quire_common.request_parameters import (
    LIMITS,
    PARAMETERS,
    PENALTIES,
    SAMPLING_NUMBERS,
    NumberCodec,
    Parameter,
    check_fields_above_low,
)
from quire_common.sequence import Sampling, check_sampling
from tools import parameters_table

NAMES = [each.name for each in PARAMETERS]
# Of the Python client: a method of its own.
ELSEWHERE = {"use_beam_search", "length_penalty"}


def test_the_page_of_parameters_is_up_to_date() -> None:
    written = parameters_table.DOCUMENT.read_text()
    assert written == parameters_table.document(), "run `python -m tools.parameters_table`"


@pytest.mark.parametrize("parameter", PARAMETERS, ids=NAMES)
def test_a_parameter_has_a_field_in_the_contract(parameter: Parameter) -> None:
    message: Any = inference_pb2.GenerateRequest.DESCRIPTOR
    *path, last = parameter.wire.split(".")
    for name in path:
        message = message.fields_by_name[name].message_type
    assert last in message.fields_by_name


@pytest.mark.parametrize("parameter", [each for each in PARAMETERS if each.name not in ELSEWHERE], ids=lambda p: p.name)
def test_the_python_client_has_it_with_the_same_default(parameter: Parameter) -> None:
    params = SamplingParams()
    default = 16 if parameter.name == "max_tokens" else parameter.default or None
    assert (getattr(params, parameter.name) or None) == default


@pytest.mark.parametrize("parameter", LIMITS, ids=lambda p: p.name)
def test_a_sequence_that_asks_for_nothing_has_the_default_of_a_limit(parameter: Parameter) -> None:
    assert getattr(Sampling(), parameter.name) == parameter.default


@pytest.mark.parametrize("parameter", PENALTIES, ids=lambda p: p.name)
def test_neutral_controls_have_the_default_of_a_penalty(parameter: Parameter) -> None:
    assert getattr(NEUTRAL, parameter.name) == parameter.default


def test_a_name_is_there_once() -> None:
    assert len(set(NAMES)) == len(NAMES)
    records = [{field.name for field in dataclasses.fields(each)} for each in (Sampling, NEUTRAL)]
    assert {each.name for each in SAMPLING_NUMBERS} <= records[0]
    assert {each.name for each in PENALTIES} <= records[1]


def test_a_limit_that_may_be_absent_is_sent_where_it_is_asked_for() -> None:
    codec, message = NumberCodec(SAMPLING_NUMBERS), pb.SamplingParams()
    codec.into_pb(Sampling(), message)
    assert not message.HasField("typical_p") and codec.from_pb(message)["typical_p"] == 1.0
    codec.into_pb(Sampling(typical_p=0.5), message)
    assert codec.from_pb(message)["typical_p"] == 0.5


@pytest.mark.parametrize("value", [0.0, 1.5, float("nan")])
def test_an_engine_refuses_a_limit_out_of_bounds(value: float) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_sampling(Sampling(typical_p=value))
    assert (refused.value.param, refused.value.fix) == ("typical_p", "Choose a value above 0 and at most 1.")


def test_a_body_with_a_limit_at_an_open_bound_is_refused() -> None:
    values = {each.name: each.default for each in PARAMETERS} | {"typical_p": 0.0}
    with pytest.raises(InvalidArgument, match=r"typical_p is 0\.") as refused:
        check_fields_above_low(values)
    assert refused.value.fix == "Choose a value above 0; 1 keeps all."

"""The table of request parameters: what is written from it is up to date, and what names a parameter agrees with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quire import SamplingParams
from quire.v1 import inference_pb2
from quire_common.logit_controls import NEUTRAL
from quire_common.request_parameters import DRAW_NUMBERS, LIMITS, PARAMETERS, PENALTIES, Parameter
from quire_common.sequence import Sampling
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
    assert {each.name for each in DRAW_NUMBERS} <= records[0]
    assert {each.name for each in PENALTIES} <= records[1]

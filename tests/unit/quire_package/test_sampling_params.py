from __future__ import annotations

import math
from typing import Any

import pytest

from quire import InvalidArgument, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from quire.wire import build_request


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.n, params.seed) == (16, 0, 1, None)
    assert params.skip_special_tokens
    assert not params.ignore_eos


BAD: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": "hot"},
    {"temperature": True},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_p": math.nan},
    {"top_k": -2},
    {"top_k": 1.5},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"n": 0},
    {"n": True},
    {"seed": -2},
    {"seed": 2**64},
    {"seed": 1.0},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 2**32},
    {"min_tokens": -1},
    {"min_tokens": 17},
    {"logprobs": -1},
    {"stop": ""},
    {"stop": ["x", ""]},
    {"stop": [3]},
    {"stop": 5},
    {"stop_token_ids": 5},
    {"stop_token_ids": "5"},
    {"allowed_token_ids": 5},
    {"bad_words": "ab"},
    {"logits_processors": "ab"},
    {"logit_bias": [1]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": ["a"]},
    {"presence_penalty": 2.1},
    {"bad_words": [""]},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0},
    {"logit_bias": {-1: 0.0}},
    {"logit_bias": {1: math.nan}},
    {"allowed_token_ids": [2**31]},
    {"thinking_token_budget": -2},
    {"logits_processors": [len]},
    {"logits_processors": [""]},
    {"structured_outputs": {"regex": "a"}},
    {"ignore_eos": True, "structured_outputs": StructuredOutputsParams(regex="a")},
]


@pytest.mark.parametrize("fields", BAD, ids=repr)
def test_a_bad_value_is_a_typed_error_that_names_it(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as raised:
        SamplingParams(**fields)
    assert raised.value.param == next(iter(fields))
    assert raised.value.code == "BAD_SAMPLING_PARAM"
    assert raised.value.fix


@pytest.mark.parametrize(
    "fields, kind, text",
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json": '{"a":1}', "strict": True}, "json_schema", '{"a":1}'),
        ({"regex": "a+", "whitespace_pattern": " "}, "regex", "a+"),
        ({"choice": ("a", "b")}, "choice", '["a", "b"]'),
        ({"grammar": 'root ::= "a"', "disable_any_whitespace": True}, "grammar", 'root ::= "a"'),
        ({"json_object": True, "disable_additional_properties": True}, "json_object", ""),
        ({"structural_tag": {"format": {}}}, "structural_tag", '{"format": {}}'),
    ],
)
def test_structured_outputs_reach_the_contract(fields: dict[str, Any], kind: str, text: str) -> None:
    asked = StructuredOutputsParams(**fields)
    sent = build_request("x", SamplingParams(structured_outputs=asked), request_id="r").constraint
    assert (sent.kind, sent.text) == (kind, text)
    for name in ("strict", "disable_any_whitespace", "disable_additional_properties"):
        assert getattr(sent, name) is fields.get(name, False)
    assert sent.whitespace_pattern == fields.get("whitespace_pattern", "")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "json_object": True},
        {"json_object": False},
        {"regex": 3},
        {"json": [1]},
        {"choice": "ab"},
        {"choice": 5},
    ],
    ids=repr,
)
def test_contradictory_structured_outputs_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as raised:
        StructuredOutputsParams(**fields)
    assert raised.value.param == "structured_outputs"


def test_a_clone_is_checked_too() -> None:
    params = SamplingParams(seed=3)
    assert params.clone(temperature=0).seed == 3
    with pytest.raises(InvalidArgument):
        params.clone(max_tokens=0)


def test_stop_in_either_form() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": -2},
        {"truncate_prompt_tokens": -2},
        {"repetition_detection": RepetitionDetectionParams(4, 2, 3), "n": 0},
    ],
    ids=repr,
)
def test_bounds_of_what_is_asked_of_prompts(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        SamplingParams(**fields)


@pytest.mark.parametrize("values", [(0, 0, 2), (4, 5, 2), (4, 1, 1)])
def test_rules_of_repetition_that_are_none(values: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument):
        RepetitionDetectionParams(*values)

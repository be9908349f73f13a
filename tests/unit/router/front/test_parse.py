"""Bodies are parsed to jobs: defaults, equivalent spellings, and consistent field tables."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.errors import InvalidArgument, QuireError, Unsupported
from quire_common.logit_controls import LogitControls
from quire_router.front.http.body import parse_object
from quire_router.front.http.parsing.messages_parse import parse_messages
from quire_router.front.http.parsing.parse import parse_chat, parse_completion
from quire_router.front.parameters.fields import KINDS, Field, check_fields
from quire_router.front.parameters.request_limits import Limits
from quire_router.front.parameters.tables import CHAT, COMPLETION, STREAM_OPTIONS
from quire_router.sequences.job import ChatPrompt, TokenPrompt
from quire_router.sequences.structured import RequiredTools

LIMITS = Limits(max_n=8, max_logprobs=20)
MESSAGES = [{"role": "user", "content": "a"}]


def completion(**fields: Any) -> Any:
    return parse_completion({"prompt": "a", **fields}, LIMITS, timings=False)


def chat(**fields: Any) -> Any:
    return parse_chat({"messages": MESSAGES, **fields}, LIMITS, timings=False)


@pytest.mark.parametrize("table", [COMPLETION, CHAT, STREAM_OPTIONS])
def test_field_tables_are_consistent(table: dict[str, Field]) -> None:
    for name, field in table.items():
        assert field.kind in KINDS, name
        assert field.supported or field.default is None, name
        if field.supported and field.default is not None:
            check_fields({name: list(field.default) if field.kind == "strings" else _json(field.default)}, table)
        for neutral in field.neutral:
            assert name not in check_fields({name: neutral}, table)
        if field.kind in ("strings", "ints", "list", "string"):
            assert field.max_items > 0, f"{name} has no bound"


def _json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_null_equals_an_absent_field() -> None:
    for table, parse in ((COMPLETION, completion), (CHAT, chat)):
        nulls = dict.fromkeys(set(table) - {"prompt", "messages"})
        assert parse(**nulls) == parse()


def test_absent_fields_get_openais_defaults() -> None:
    job = completion().job
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k, job.sampling.logprobs) == (1, 1, 0, -1)
    assert (job.max_tokens, job.default_max_tokens, job.n, job.seed) == (None, 16, 1, None)
    assert job.text.skip_special_tokens and job.add_special_tokens and not job.ignore_eos
    assert chat().job.default_max_tokens is None


def test_equivalent_spellings_parse_alike() -> None:
    assert completion(stop="x").job.text.stop == completion(stop=["x"]).job.text.stop == ("x",)
    assert completion(top_k=-1).job.sampling.top_k == 0
    assert completion(seed=-1).job.seed is None
    assert completion(seed=-2).job.seed == 2**64 - 2
    assert completion(max_tokens=5.0).job.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).job.max_tokens == 7
    assert chat(logprobs=True).job.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).job.sampling.logprobs == 3
    assert completion(logprobs=0).job.sampling.logprobs == 0


def test_logit_controls_are_parsed_and_clamped() -> None:
    assert completion(presence_penalty=0, repetition_penalty=1, logit_bias={}).job.sampling.controls is None
    controls = completion(logit_bias={"12": 3, "5": -1000}, repetition_penalty=0.5).job.sampling.controls
    assert controls == LogitControls(repetition_penalty=0.5, logit_bias=((5, -100.0), (12, 3.0)))
    assert chat(bad_words="x").job.bad_words == chat(bad_words=["x"]).job.bad_words == ("x",)


def test_stream_options_are_parsed() -> None:
    parsed = completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert parsed.stream and parsed.include_usage and parsed.continuous_usage
    assert parsed.job.wants.stream and parsed.job.wants.every_token


def test_all_forms_of_prompts_are_parsed() -> None:
    (ids,) = completion(prompt=[1, 2]).job.prompts
    assert isinstance(ids, TokenPrompt) and ids.ids.dtype == "int32" and ids.ids.tolist() == [1, 2]
    assert len(completion(prompt=[[1], [2, 3]]).job.prompts) == 2
    assert completion(prompt=["a", "b"], n=3).job.weight == 6


def test_messages_reach_the_template_unchanged() -> None:
    message = {"role": "user", "content": "é", "name": "x"}
    (prompt,) = chat(messages=[message], chat_template_kwargs={"a": 1}).job.prompts
    assert isinstance(prompt, ChatPrompt)
    assert json.loads(prompt.messages_json) == [message] and json.loads(prompt.template_kwargs_json) == {"a": 1}
    assert prompt.add_generation_prompt and not prompt.continue_final_message
    (prompt,) = chat(continue_final_message=True).job.prompts
    assert prompt.continue_final_message and not prompt.add_generation_prompt


def test_template_fields_are_passed_to_the_template() -> None:
    documents = [{"title": "t", "text": "x"}]
    (prompt,) = chat(documents=documents, reasoning_effort="low", chat_template="{{ x }}").job.prompts
    assert isinstance(prompt, ChatPrompt) and prompt.template == "{{ x }}"
    assert json.loads(prompt.template_kwargs_json) == {"documents": documents, "reasoning_effort": "low"}
    kwargs = {"reasoning_effort": "high", "enable_thinking": False}
    (prompt,) = chat(chat_template_kwargs=kwargs, reasoning_effort="low").job.prompts
    assert isinstance(prompt, ChatPrompt) and prompt.template == ""
    assert json.loads(prompt.template_kwargs_json) == {"reasoning_effort": "low", "enable_thinking": False}
    (prompt,) = chat(documents=[]).job.prompts
    assert isinstance(prompt, ChatPrompt) and json.loads(prompt.template_kwargs_json) == {"documents": []}
    with pytest.raises(InvalidArgument, match="documents has 1025 items"):
        chat(documents=[{}] * 1025)


def test_unsupported_fields_are_named() -> None:
    for name, value in (("suffix", "x"), ("prompt_embeds", "x")):
        with pytest.raises(Unsupported) as caught:
            completion(**{name: value})
        assert caught.value.param == name
    with pytest.raises(Unsupported):
        chat(echo=0)  # a number is not the boolean that would change nothing


_TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def test_tools_go_to_the_template_and_the_parser_unless_none_may_be_called() -> None:
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        job = chat(tools=[_TOOL], **choice).job
        (prompt,) = job.prompts
        assert isinstance(prompt, ChatPrompt) and json.loads(prompt.tools_json) == [_TOOL]
        assert job.text.parsing is not None and job.text.parsing.tool_calls
        assert job.text.parsing.tools_json == prompt.tools_json
    without: list[dict[str, Any]] = [{"tools": [_TOOL], "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}]
    for fields in without:
        job = chat(**fields).job
        (prompt,) = job.prompts
        assert isinstance(prompt, ChatPrompt) and not prompt.tools_json
        assert job.text.parsing is not None and job.text.parsing.reasoning and not job.text.parsing.tool_calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [_TOOL, _TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": 3}}}, "tool_choice"),
        ({"tools": [_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"tools": [_TOOL], "tool_choice": ["required"]}, "tool_choice"),
        ({"tools": [_TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [_TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [_TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [_TOOL] * 1025}, "tools"),
    ],
)
def test_tools_that_cannot_be_served_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(QuireError) as caught:
        chat(**fields)
    assert caught.value.param == param and caught.value.fix


_STRICT = {"type": "function", "function": {"name": "look", "strict": True}}
_NAMED = {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize(
    ("fields", "demanded"),
    [
        ({"tools": [_TOOL]}, None),
        ({"tools": [_TOOL, _STRICT], "tool_choice": "none"}, None),
        ({"tools": [_TOOL, _STRICT]}, (False, "", True)),
        ({"tools": [_STRICT], "parallel_tool_calls": False}, (False, "", False)),
        ({"tools": [_TOOL], "tool_choice": "required"}, (True, "", True)),
        ({"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False}, (True, "", False)),
        ({"tools": [_TOOL, _STRICT], "tool_choice": _NAMED}, (True, "find", False)),
    ],
)
def test_choices_and_strict_tools_demand_calls(fields: dict[str, Any], demanded: tuple[bool, str, bool] | None) -> None:
    structure = chat(**fields).job.structure
    if demanded is None:
        assert structure is None
        return
    assert isinstance(structure, RequiredTools) and json.loads(structure.tools_json) == fields["tools"]
    assert (structure.required, structure.name, structure.parallel) == demanded


def test_unknown_field_error_suggests_the_nearest_field() -> None:
    with pytest.raises(InvalidArgument) as caught:
        completion(max_token=1)
    assert caught.value.code == "UNKNOWN_FIELD" and "max_tokens" in caught.value.fix
    with pytest.raises(InvalidArgument) as caught:
        completion(**{"z" * 10_000: 1})
    assert len(caught.value.message) < 200


@given(st.binary(max_size=60))
def test_arbitrary_bytes_parse_or_raise_a_typed_error(body: bytes) -> None:
    try:
        assert isinstance(parse_object(body), dict)
    except InvalidArgument as error:
        assert error.code in ("INVALID_JSON", "INVALID_UTF8", "NOT_AN_OBJECT")


def test_only_a_message_without_tool_calls_is_continued() -> None:
    called = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    for blocks, continues in (("b", True), ([{"type": "text", "text": "b"}, called], False), ([called], False)):
        messages = [*MESSAGES, {"role": "assistant", "content": blocks}]
        (prompt,) = parse_messages({"messages": messages, "max_tokens": 1}, LIMITS, timings=False).job.prompts
        assert isinstance(prompt, ChatPrompt)
        # The text of a message that is continued is the prompt's end: calls behind it would be left out.
        assert prompt.continue_final_message is continues
        assert prompt.add_generation_prompt is not continues


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted({*COMPLETION, *CHAT, "other"})), JSON, max_size=4))
def test_arbitrary_fields_parse_or_raise_a_typed_error(fields: dict[str, Any]) -> None:
    for parse in (parse_completion, parse_chat):
        try:
            parse({"prompt": "a", "messages": MESSAGES, **fields}, LIMITS, timings=False)
        except InvalidArgument as error:
            assert error.code and error.fix

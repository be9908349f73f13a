"""Tool calls and structured output with the openai package."""

from __future__ import annotations

import openai
from common import KEY, MODEL, URL, run
from forecast import ASKED, FUNCTION, TOOL, Forecast, checked

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
chats = client.chat.completions
CALL = {"model": MODEL, "messages": ASKED, "tools": [TOOL], "tool_choice": "required", "temperature": 0}
CALL |= {"max_completion_tokens": 200, "parallel_tool_calls": False}


def a_required_call_follows_its_schema() -> None:
    choice = chats.create(**CALL).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.id and call.type == "function"
    assert call.function.name == "get_weather" and checked(call.function.arguments)


def streamed_calls_are_the_same() -> None:
    (whole,) = chats.create(**CALL).choices[0].message.tool_calls
    chunks = [chunk.choices[0] for chunk in chats.create(**CALL, stream=True) if chunk.choices]
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0} and deltas[0].id and deltas[0].function.name == "get_weather"
    assert "".join(delta.function.arguments or "" for delta in deltas) == whole.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def a_named_function_is_called() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    (call,) = chats.create(**{**CALL, "tool_choice": named}).choices[0].message.tool_calls
    assert checked(call.function.arguments)


def a_result_goes_back() -> None:
    message = chats.create(**CALL).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."}
    again = {**CALL, "messages": [*ASKED, message, result], "tool_choice": "none", "max_completion_tokens": 8}
    assert chats.create(**again).choices[0].message.tool_calls is None


def parse_returns_the_model_of_pydantic() -> None:
    answer = chats.parse(
        model=MODEL, messages=ASKED, response_format=Forecast, temperature=0, max_completion_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Forecast)


def parse_returns_arguments_of_strict_tools() -> None:
    tool = openai.pydantic_function_tool(Forecast, name="get_weather")
    answer = chats.parse(**{**CALL, "tools": [tool]})
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Forecast)


def the_stream_helper_sees_calls() -> None:
    tool = openai.pydantic_function_tool(Forecast, name="get_weather")
    with chats.stream(**{**CALL, "tools": [tool]}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Forecast)


def responses_call_and_parse() -> None:
    asked = {"model": MODEL, "input": ASKED[0]["content"], "max_output_tokens": 200, "temperature": 0}
    tools = [{"type": "function", "strict": True, **FUNCTION}]
    called = {**asked, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = (item for item in client.responses.create(**called).output if item.type == "function_call")
    assert call.name == "get_weather" and call.call_id and checked(call.arguments)
    events = list(client.responses.create(**called, stream=True))
    assert [e.arguments for e in events if e.type == "response.function_call_arguments.done"] == [call.arguments]
    assert isinstance(client.responses.parse(**asked, text_format=Forecast).output_parsed, Forecast)


if __name__ == "__main__":
    calls = [a_required_call_follows_its_schema, streamed_calls_are_the_same, a_named_function_is_called]
    parses = [parse_returns_the_model_of_pydantic, parse_returns_arguments_of_strict_tools]
    run(*calls, a_result_goes_back, *parses, the_stream_helper_sees_calls, responses_call_and_parse)

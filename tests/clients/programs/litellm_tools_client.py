"""Tool calls and structured output with the litellm package."""

from __future__ import annotations

import litellm
from common import KEY, MODEL, URL, run
from forecast import ASKED, SCHEMA, TOOL, checked

litellm.telemetry = False
HERE = {"api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0, "max_retries": 0}
ASK = {"model": f"openai/{MODEL}", "messages": ASKED, "temperature": 0, "max_tokens": 200, **HERE}
CALL = {**ASK, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def a_required_call_follows_its_schema() -> None:
    choice = litellm.completion(**CALL).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert checked(call.function.arguments)


def streamed_calls_are_the_same() -> None:
    whole = litellm.completion(**CALL).choices[0].message.tool_calls[0].function.arguments
    built = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **CALL)))
    assert built.choices[0].message.tool_calls[0].function.arguments == whole


def an_answer_follows_a_schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA, "strict": True}}
    assert checked(litellm.completion(response_format=wanted, **ASK).choices[0].message.content)


if __name__ == "__main__":
    run(a_required_call_follows_its_schema, streamed_calls_are_the_same, an_answer_follows_a_schema)

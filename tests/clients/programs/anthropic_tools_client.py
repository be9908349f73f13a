"""Tool calls with the anthropic package."""

from __future__ import annotations

import anthropic
from common import KEY, MODEL, URL, run
from forecast import ASKED, SCHEMA, checked

messages = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0).messages
TOOL = {"name": "get_weather", "description": "Get the weather.", "input_schema": SCHEMA}
CALL = {"model": MODEL, "max_tokens": 200, "messages": ASKED, "tools": [TOOL], "extra_body": {"temperature": 0}}
ANY = {"type": "any", "disable_parallel_tool_use": True}


def any_tool_is_called() -> None:
    answer = messages.create(**CALL, tool_choice=ANY)
    (block,) = answer.content
    assert answer.stop_reason == "tool_use" and block.type == "tool_use" and block.id
    assert block.name == "get_weather" and checked(block.input)


def streamed_calls_are_the_same() -> None:
    whole = messages.create(**CALL, tool_choice=ANY).content[0].input
    with messages.stream(**CALL, tool_choice=ANY) as stream:
        kinds = {event.delta.type for event in stream if event.type == "content_block_delta"}
        final = stream.get_final_message()
    assert "input_json_delta" in kinds and final.content[0].input == whole and final.stop_reason == "tool_use"


def a_named_tool_is_called_and_its_result_goes_back() -> None:
    answer = messages.create(**CALL, tool_choice={"type": "tool", "name": "get_weather"})
    block = answer.content[0]
    assert checked(block.input)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "Rain."}]}
    history = [*ASKED, {"role": "assistant", "content": answer.content}, result]
    again = messages.create(**{**CALL, "messages": history, "max_tokens": 8}, tool_choice={"type": "none"})
    assert all(each.type == "text" for each in again.content)


if __name__ == "__main__":
    run(any_tool_is_called, streamed_calls_are_the_same, a_named_tool_is_called_and_its_result_goes_back)

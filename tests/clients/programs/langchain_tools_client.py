"""Tool calls and structured output with the langchain-openai package."""

from __future__ import annotations

from common import KEY, MODEL, URL, run
from forecast import ASKED, TOOL, Forecast, checked
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(
    model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0, temperature=0, max_tokens=200
)  # fmt: skip
QUESTION = ASKED[0]["content"]


def bound_tools_are_called() -> None:
    bound = chat.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "get_weather" and call["id"] and checked(call["args"])
    whole = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.tool_calls[0]["args"] == call["args"]


def structured_output_by_schema() -> None:
    assert isinstance(chat.with_structured_output(Forecast, method="json_schema").invoke(QUESTION), Forecast)


def structured_output_by_a_call() -> None:
    assert isinstance(chat.with_structured_output(Forecast, method="function_calling").invoke(QUESTION), Forecast)


if __name__ == "__main__":
    run(bound_tools_are_called, structured_output_by_schema, structured_output_by_a_call)

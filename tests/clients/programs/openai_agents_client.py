"""Agents of the openai-agents package, which call tools that run here."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import KEY, MODEL, URL, run
from forecast import ASKED, Forecast
from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)
QUESTION = ASKED[0]["content"]
settings = ModelSettings(temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)
called: list[Forecast] = []


@function_tool
def get_weather(forecast: Forecast) -> str:
    """Get the weather."""
    called.append(forecast)
    return f"Rain in {forecast.city}."


def _ask(kind: type, **options: object) -> object:
    async def ask() -> object:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
            agent = Agent(name="weather", model=kind(MODEL, openai_client=client), **options)
            return (await Runner.run(agent, QUESTION)).final_output

    return asyncio.run(ask())


def _calls_with(kind: type) -> None:
    called.clear()
    answer = _ask(kind, tools=[get_weather], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    assert len(called) == 1 and answer == f"Rain in {called[0].city}."


def tools_run_by_chat() -> None:
    _calls_with(OpenAIChatCompletionsModel)


def tools_run_by_responses() -> None:
    _calls_with(OpenAIResponsesModel)


def output_follows_a_schema() -> None:
    free = ModelSettings(temperature=0, max_tokens=200)
    assert isinstance(_ask(OpenAIChatCompletionsModel, output_type=Forecast, model_settings=free), Forecast)


if __name__ == "__main__":
    run(tools_run_by_chat, tools_run_by_responses, output_follows_a_schema)

"""Agents of the pydantic-ai package, whose output is a call or an answer that follows a schema."""

from __future__ import annotations

import asyncio

from common import KEY, MODEL, URL, run
from forecast import ASKED, Forecast
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))
settings = ModelSettings(temperature=0, max_tokens=200, parallel_tool_calls=False)
QUESTION = ASKED[0]["content"]


def output_comes_by_a_call() -> None:
    result = Agent(model, output_type=Forecast, model_settings=settings).run_sync(QUESTION)
    assert isinstance(result.output, Forecast) and result.usage.output_tokens > 0


def output_follows_a_schema() -> None:
    result = Agent(model, output_type=NativeOutput(Forecast), model_settings=settings).run_sync(QUESTION)
    assert isinstance(result.output, Forecast)


def output_is_streamed() -> None:
    async def ask() -> Forecast:
        async with Agent(model, output_type=Forecast, model_settings=settings).run_stream(QUESTION) as answer:
            return await answer.get_output()

    assert isinstance(asyncio.run(ask()), Forecast)


if __name__ == "__main__":
    run(output_comes_by_a_call, output_follows_a_schema, output_is_streamed)

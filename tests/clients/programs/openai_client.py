"""The openai package, as its users use it."""

from __future__ import annotations

import asyncio

import openai
from common import KEY, MESSAGES, MODEL, PROMPT, URL, fails, run, wait_idle

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
chats, completions = client.chat.completions, client.completions


def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    answer = chats.create(model=MODEL, messages=MESSAGES, max_completion_tokens=12, temperature=0)
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and 0 < answer.usage.completion_tokens <= 12


def chat_stream_says_the_same() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 16, "temperature": 0}
    whole = chats.create(**asked)
    chunks = list(chats.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert set(reasons[:-1]) <= {None} and reasons[-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def stream_helper() -> None:
    with chats.stream(model=MODEL, messages=MESSAGES, max_completion_tokens=8, temperature=0) as stream:
        kinds = {event.type for event in stream}
        assert "content.delta" in kinds and stream.current_completion_snapshot.choices[0].message.content


def logprobs() -> None:
    answer = chats.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=5, logprobs=True, top_logprobs=3, temperature=0
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens and all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob <= 0 and entry.token == entry.top_logprobs[0].token for entry in content)
    legacy = completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, logprobs=2, echo=True, temperature=0)
    found = legacy.choices[0].logprobs
    assert legacy.choices[0].text.startswith(PROMPT) and found.token_logprobs[0] is None
    # The first token is the tokenizer's own opening.
    assert "".join(found.tokens[1:]) == legacy.choices[0].text and len(found.text_offset) == len(found.tokens)


def four_choices() -> None:
    answer = chats.create(model=MODEL, messages=MESSAGES, n=4, seed=7, max_completion_tokens=10, temperature=1.2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.message.content for choice in answer.choices]
    again = chats.create(model=MODEL, messages=MESSAGES, n=4, seed=7, max_completion_tokens=10, temperature=1.2)
    assert len(set(texts)) > 1 and texts == [choice.message.content for choice in again.choices]


def stop() -> None:
    free = completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text
    word = free.split()[2]
    cut = completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=[word]).choices[0]
    assert cut.finish_reason == "stop" and cut.text == free[: free.index(word)]


def abort() -> None:
    forever = {"max_completion_tokens": 2000, "extra_body": {"ignore_eos": True}}
    stream = chats.create(model=MODEL, messages=MESSAGES, stream=True, **forever)
    next(iter(stream))
    stream.close()
    wait_idle()


def responses() -> None:
    answer = client.responses.create(model=MODEL, input="Speak.", max_output_tokens=8, temperature=0)
    assert answer.object == "response" and answer.output_text
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    events = list(client.responses.create(model=MODEL, input="Speak.", max_output_tokens=8, temperature=0, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text


def errors() -> None:
    ask = {"messages": MESSAGES, "max_completion_tokens": 1}
    fails(openai.NotFoundError, lambda: chats.create(model="nope", **ask), "nope")
    fails(openai.BadRequestError, lambda: chats.create(model=MODEL, temperature=-1, **ask), "temperature")
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    fails(openai.AuthenticationError, lambda: stranger.chat.completions.create(model=MODEL, **ask))
    error = fails(openai.BadRequestError, lambda: completions.create(model=MODEL, prompt="a", max_tokens=10**6))
    assert error.code and error.param == "max_tokens" and error.request_id


def asynchronous() -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as aclient:
            asked = (
                aclient.completions.create(model=MODEL, prompt=f"{PROMPT}{i}", max_tokens=4, temperature=0)
                for i in range(8)
            )
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    assert len(asyncio.run(ask())) == 8


if __name__ == "__main__":
    checks = [models, chat, chat_stream_says_the_same, stream_helper, logprobs, four_choices, stop, abort, errors]
    run(*checks, responses, asynchronous)

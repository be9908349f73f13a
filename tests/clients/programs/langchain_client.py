"""The langchain-openai package."""

from __future__ import annotations

import openai
from common import KEY, MODEL, PROMPT, URL, fails, run, wait_idle
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

HERE = {"base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "temperature": 0}


def chat_and_stream_agree() -> None:
    chat = ChatOpenAI(model=MODEL, max_tokens=12, **HERE)
    whole = chat.invoke("Speak of love.")
    assert whole.content == "".join(chunk.content for chunk in chat.stream("Speak of love."))
    assert whole.usage_metadata["output_tokens"] > 0
    assert len(chat.batch(["a", "b", "c"])) == 3


def logprobs_and_four_choices() -> None:
    chat = ChatOpenAI(model=MODEL, max_tokens=4, **HERE).bind(logprobs=True, top_logprobs=2)
    assert chat.invoke("Speak.").response_metadata["logprobs"]["content"]
    four = ChatOpenAI(model=MODEL, max_tokens=4, n=4, **{**HERE, "temperature": 1.2})
    assert len(four.generate([[HumanMessage("Speak.")]]).generations[0]) == 4


def completion_and_stop() -> None:
    model = OpenAI(model=MODEL, max_tokens=24, **HERE)
    free = model.invoke(PROMPT)
    word = free.split()[2]
    assert model.invoke(PROMPT, stop=[word]) == free[: free.index(word)]


def abort() -> None:
    chat = ChatOpenAI(model=MODEL, max_tokens=2000, extra_body={"ignore_eos": True}, **HERE)
    stream = chat.stream("Speak.")
    next(stream)
    stream.close()
    wait_idle()


def errors() -> None:
    fails(openai.NotFoundError, lambda: ChatOpenAI(model="nope", **HERE).invoke("a"), "nope")
    fails(openai.AuthenticationError, lambda: ChatOpenAI(model=MODEL, **{**HERE, "api_key": "wrong"}).invoke("a"))


if __name__ == "__main__":
    run(chat_and_stream_agree, logprobs_and_four_choices, completion_and_stop, abort, errors)

"""The litellm package, by its OpenAI-compatible provider."""

from __future__ import annotations

import litellm
from common import KEY, MESSAGES, MODEL, PROMPT, URL, fails, run, wait_idle

litellm.telemetry = False
HERE = {"api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0, "max_retries": 0}
CHAT = {"model": f"openai/{MODEL}", "messages": MESSAGES, "temperature": 0, **HERE}


def chat_and_stream_agree() -> None:
    whole = litellm.completion(max_tokens=12, **CHAT)
    chunks = list(litellm.completion(max_tokens=12, stream=True, stream_options={"include_usage": True}, **CHAT))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text and whole.usage.completion_tokens > 0


def logprobs_and_four_choices() -> None:
    answer = litellm.completion(max_tokens=4, logprobs=True, top_logprobs=2, **CHAT)
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    asked = {**CHAT, "temperature": 1.2, "seed": 3}
    assert len(litellm.completion(max_tokens=4, n=4, **asked).choices) == 4


def stop() -> None:
    asked = {"model": f"text-completion-openai/{MODEL}", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **HERE}
    free = litellm.text_completion(**asked).choices[0].text
    word = free.split()[2]
    assert litellm.text_completion(stop=[word], **asked).choices[0].text == free[: free.index(word)]


def abort() -> None:
    stream = litellm.completion(max_tokens=2000, stream=True, extra_body={"ignore_eos": True}, **CHAT)
    next(iter(stream))
    stream.completion_stream.close()
    wait_idle()


def errors() -> None:
    fails(litellm.NotFoundError, lambda: litellm.completion(**{**CHAT, "model": "openai/nope"}), "nope")
    fails(litellm.AuthenticationError, lambda: litellm.completion(**{**CHAT, "api_key": "wrong"}))
    fails(litellm.BadRequestError, lambda: litellm.completion(**{**CHAT, "temperature": -1}))


if __name__ == "__main__":
    run(chat_and_stream_agree, logprobs_and_four_choices, stop, abort, errors)

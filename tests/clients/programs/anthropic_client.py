"""The anthropic package, as its users use it."""

from __future__ import annotations

import anthropic
from common import KEY, MESSAGES, MODEL, URL, fails, run, wait_idle

client = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0)
messages = client.messages
# The package no longer has a parameter for it; the API does.
GREEDY = {"temperature": 0}


def message() -> None:
    answer = messages.create(model=MODEL, max_tokens=12, messages=MESSAGES, extra_body=GREEDY)
    assert answer.type == "message" and answer.role == "assistant" and answer.content[0].type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens > 0


def stream_says_the_same() -> None:
    asked = {"model": MODEL, "max_tokens": 16, "messages": MESSAGES, "extra_body": GREEDY}
    whole = messages.create(**asked)
    kinds, text = [], ""
    with messages.stream(**asked) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "content_block_delta":
                text += event.delta.text
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.index("content_block_start") < kinds.index("content_block_delta") < kinds.index("content_block_stop")
    assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == whole.stop_reason


def stop() -> None:
    free = messages.create(model=MODEL, max_tokens=24, messages=MESSAGES, extra_body=GREEDY).content[0].text
    word = free.split()[2]
    cut = messages.create(model=MODEL, max_tokens=24, messages=MESSAGES, extra_body=GREEDY, stop_sequences=[word])
    assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == word
    assert cut.content[0].text == free[: free.index(word)]


def count_tokens() -> None:
    counted = messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    assert counted == messages.create(model=MODEL, max_tokens=1, messages=MESSAGES).usage.input_tokens


def abort() -> None:
    with messages.stream(model=MODEL, max_tokens=2000, messages=MESSAGES) as stream:
        next(iter(stream))
    wait_idle()


def errors() -> None:
    fails(anthropic.NotFoundError, lambda: messages.create(model="nope", max_tokens=1, messages=MESSAGES), "nope")
    fails(anthropic.BadRequestError, lambda: messages.create(model=MODEL, max_tokens=1, messages=[]))
    stranger = anthropic.Anthropic(base_url=URL, auth_token="wrong", api_key=None, max_retries=0)
    fails(
        anthropic.AuthenticationError,
        lambda: stranger.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES),
    )


def by_api_key() -> None:
    """Anthropic's own header."""
    keyed = anthropic.Anthropic(base_url=URL, api_key=KEY, auth_token=None, max_retries=0)
    assert keyed.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES).content is not None


if __name__ == "__main__":
    run(message, stream_says_the_same, stop, count_tokens, abort, errors, by_api_key)

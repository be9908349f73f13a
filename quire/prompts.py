"""The kinds of prompts: text, token ids or a conversation, in the forms that users of vLLM write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import InvalidArgument


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation: OpenAI's messages, which the model's own template renders."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # In the place of the model's, where the tokenizers were started with --allow-request-chat-template.
    chat_template: str = ""
    tool_choice: str | Mapping[str, Any] = "auto"
    """OpenAI's `tool_choice`: auto, none, required, or one function."""
    parallel_tool_calls: bool = True
    separate: bool = False
    """Whether reasoning and tool calls come apart from the text. Otherwise all is text, the model's markers
    included."""


# Text, token ids, a conversation, or vLLM's {"prompt": ...} / {"prompt_token_ids": ...}, which may say a "cache_salt".
Prompt = str | Sequence[int] | ChatPrompt | Mapping[str, Any]
_SALT = "cache_salt"
_FIELDS = ("prompt", "prompt_token_ids", _SALT)
# Sequences of integers that are no token ids.
_BYTES = (bytes, bytearray, memoryview)


def normalise(prompt: Prompt) -> str | list[int] | ChatPrompt:
    """Return the prompt in one of three forms: text, a list of token ids, or a ChatPrompt. A mapping counts as its
    `prompt_token_ids` if it has this key, even with None, or else its `prompt`. Raises InvalidArgument for an empty
    text or list, unknown fields of a mapping (unless they are None), or any other type; bytes are no token ids, and a
    bool is none either."""
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidArgument(
                "EMPTY_PROMPT", "The prompt is empty.", "Give at least one character.", param="prompt"
            )
        return prompt
    if isinstance(prompt, ChatPrompt):
        return prompt
    if isinstance(prompt, Mapping):
        unknown = sorted(str(name) for name, value in prompt.items() if name not in _FIELDS and value is not None)
        if unknown:
            raise InvalidArgument(
                "BAD_PROMPT",
                f"A prompt's field {unknown[0]!r} is not understood.",
                f"Give {', '.join(_FIELDS)}.",
                param="prompt",
            )
        if "prompt_token_ids" in prompt:
            return normalise(prompt["prompt_token_ids"])
        if "prompt" in prompt:
            return normalise(prompt["prompt"])
    elif isinstance(prompt, Sequence) and not isinstance(prompt, _BYTES):
        tokens = [token for token in prompt if isinstance(token, int) and not isinstance(token, bool)]
        if not prompt:
            raise InvalidArgument("EMPTY_PROMPT", "The prompt has no tokens.", "Give at least one.", param="prompt")
        if len(tokens) == len(prompt):
            return tokens
    raise InvalidArgument(
        "BAD_PROMPT",
        f"A prompt of type {type(prompt).__name__} is not understood.",
        'Give text, a list of token ids, {"prompt": ...}, {"prompt_token_ids": ...} or a ChatPrompt.',
        param="prompt",
    )


def cache_salt_of(prompt: Prompt) -> str:
    """Return the salt that separates the prompt's cached pages from those of other salts; empty unless a mapping has
    one. Raises InvalidArgument for a salt that is not text."""
    salt = prompt.get(_SALT) if isinstance(prompt, Mapping) else None
    if not isinstance(salt, str | None):
        raise InvalidArgument("BAD_PROMPT", "A prompt's cache_salt is not a text.", "Give a string.", param=_SALT)
    return salt or ""


def salted(tokens: list[int], salt: str) -> Prompt:
    """Return token ids with a salt, or without one."""
    return {"prompt_token_ids": tokens, _SALT: salt} if salt else tokens


def is_batch(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether a call's argument is a list of prompts, and not one prompt. A list of integers is one prompt, as in vLLM;
    an empty list is a batch."""
    if isinstance(prompts, (str, ChatPrompt, Mapping, *_BYTES)):
        return False
    return not (len(prompts) > 0 and all(isinstance(item, int) for item in prompts))

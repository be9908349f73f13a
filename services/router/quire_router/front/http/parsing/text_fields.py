"""Converts bodies of the routes that generate nothing: /tokenize, /detokenize, and the render routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire_router.front.http.parsing.parse import ParsedRequest, chat_prompt
from quire_router.front.http.parsing.prompts import required, token_prompt
from quire_router.front.parameters.fields import check_fields, json_text
from quire_router.front.parameters.tables import DETOKENIZE, TOKENIZE, TOKENIZE_CHAT
from quire_router.sequences.job import ChatPrompt, TextPrompt, TokenPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_router.front.parameters.request_limits import Limits


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A text or a conversation whose token ids the client wants."""

    model: str
    prompt: TextPrompt | ChatPrompt
    add_special_tokens: bool = True
    return_token_strs: bool = False


@dataclass(frozen=True, slots=True)
class CountRequest:
    """A conversation whose number of tokens the client wants."""

    model: str
    prompt: ChatPrompt


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Token ids whose text the client wants."""

    model: str
    prompt: TokenPrompt


@dataclass(frozen=True, slots=True)
class RenderRequest:
    """A request that is not run. The answer repeats `stream_options` and `kv_transfer_params`, as JSON."""

    request: ParsedRequest
    stream_options_json: str
    kv_transfer_params_json: str


def parse_tokenize(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> TokenizeRequest:
    """Check a body of /tokenize, which has a conversation if it has `messages`, else a text in `prompt`. Raises
    InvalidArgument for missing, unknown or wrong fields, and Unsupported as `chat_prompt` does. `limits` and `timings`
    are not used."""
    if "messages" in body:
        values = check_fields(body, TOKENIZE_CHAT)
        return TokenizeRequest(
            values["model"], chat_prompt(values, body), return_token_strs=values["return_token_strs"]
        )
    values = check_fields(body, TOKENIZE)
    return TokenizeRequest(
        values["model"],
        TextPrompt(required(values, "prompt")),
        add_special_tokens=values["add_special_tokens"],
        return_token_strs=values["return_token_strs"],
    )


def parse_detokenize(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> DetokenizeRequest:
    """Parse a body of /detokenize. Raises InvalidArgument for missing, unknown or wrong fields."""
    values = check_fields(body, DETOKENIZE)
    return DetokenizeRequest(values["model"], token_prompt(required(values, "tokens"), "tokens"))


def parse_render(body: Mapping[str, Any], request: ParsedRequest) -> RenderRequest:
    """Add to a parsed request the stream options and KV transfer parameters of its body, as JSON, which the answer
    repeats. Raises InvalidArgument."""
    names = ("stream_options", "kv_transfer_params")
    return RenderRequest(request, *(json_text(name, body.get(name)) for name in names))

"""Names the parsers of all routes with a JSON body, so that another process can be told which one to run.

Each parser gets the decoded body and the bounds of its model, and returns an object that `parsed_codec` can send.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument
from quire_router.front.http.body import parse_object
from quire_router.front.http.parsing.messages_parse import parse_count, parse_messages
from quire_router.front.http.parsing.parse import parse_chat, parse_completion
from quire_router.front.http.parsing.sampling_params import parse_tokens
from quire_router.front.http.parsing.text_fields import parse_detokenize, parse_render, parse_tokenize
from quire_router.front.http.responses.parse import parse_response

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quire_common.credit.hello import SamplingDefaults
    from quire_router.front.http.parsing.parse import ParsedRequest
    from quire_router.front.http.parsing.text_fields import RenderRequest
    from quire_router.front.parameters.request_limits import Limits


@dataclass(frozen=True, slots=True)
class InvocationRequest:
    """A body of SageMaker's one path for all, which is a chat or a completion."""

    request: ParsedRequest
    is_chat: bool


def parse_body(
    name: str,
    body: bytes,
    limits: Limits,
    defaults: Mapping[str, SamplingDefaults],
    *,
    timings: bool,
) -> Any:
    """Decode a body and run the parser `name` on it, with the defaults of the body's model, if `defaults` has it.
    `defaults` has the sampling defaults of models by their names; the name '' is the model of a body that names none.
    `timings`: the client wants timings in the answer. Raises InvalidArgument for a body that is no JSON object or has
    too many values, MemoryError if memory runs out, and the parser's InvalidArgument or Unsupported."""
    decoded = parse_object(body)
    model = decoded.get("model")
    own = defaults.get(model if isinstance(model, str) else "")
    return PARSERS[name](decoded, replace(limits, model_defaults=own) if own else limits, timings=timings)


def _parse_invocation(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> InvocationRequest:
    """Parse a chat if the body has messages, otherwise a completion if it has a prompt. Raises InvalidArgument if it
    has neither, and the errors of `parse_chat` or `parse_completion`. `timings`: the client wants timings in the
    answer."""
    if "messages" not in body and "prompt" not in body:
        raise InvalidArgument(
            "MISSING_FIELD", "The body has neither messages nor a prompt.", "Send one of them.", param="messages"
        )
    is_chat = "messages" in body
    parse = parse_chat if is_chat else parse_completion
    return InvocationRequest(parse(body, limits, timings=timings), is_chat)


def _parse_chat_render(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> RenderRequest:
    return parse_render(body, parse_chat(body, limits, timings=timings))


def _parse_completion_render(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> RenderRequest:
    return parse_render(body, parse_completion(body, limits, timings=timings))


PARSERS: Mapping[str, Callable[..., Any]] = {
    "chat": parse_chat,
    "chat_render": _parse_chat_render,
    "completion": parse_completion,
    "completion_render": _parse_completion_render,
    "count": parse_count,
    "detokenize": parse_detokenize,
    "invocation": _parse_invocation,
    "messages": parse_messages,
    "response": parse_response,
    "tokenize": parse_tokenize,
    "tokens": parse_tokens,
}

"""/v1/responses: a body to a job and to what the response object repeats of it. Text in, text out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument, Unsupported
from quire_common.sequence import unsupported
from quire_router.front.http.parsing.parse import ParsedRequest, job_request
from quire_router.front.http.parsing.prompts import json_text, required
from quire_router.front.parameters.fields import bad_type, check_fields
from quire_router.front.parameters.tables import RESPONSE_REASONING, RESPONSE_TEXT, RESPONSES, SAMPLING
from quire_router.sequences.job import ChatPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quire_router.front.parameters.request_limits import Limits

LOGPROBS = "message.output_text.logprobs"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """A checked body without its input. `messages` are those of the input; a previous response's come before them."""

    values: Mapping[str, Any]
    messages: Sequence[Mapping[str, str]]

    @property
    def previous(self) -> str | None:
        """The id of the response that this one goes on from, if any."""
        found: str | None = self.values["previous_response_id"]
        return found


def parse_response(body: Mapping[str, Any], limits: Limits) -> AskedResponse:
    """Check a body of /v1/responses. Raises InvalidArgument, Unsupported."""
    values = check_fields(body, RESPONSES, limits.sampling_defaults(body))
    check_fields(values["text"] or {}, RESPONSE_TEXT)
    check_fields(values["reasoning"] or {}, RESPONSE_REASONING)
    if values["truncation"] not in ("auto", "disabled"):
        raise InvalidArgument(
            "BAD_VALUE", "truncation is neither auto nor disabled.", "Choose one of them.", param="truncation"
        )
    if values["background"] and values["stream"]:
        raise Unsupported(
            "PARAMETER_UNSUPPORTED",
            "A response in the background cannot be streamed by this version of Quire.",
            "Leave stream out and ask for the response by its id.",
            param="stream",
        )
    messages = _messages(required(values, "input"))
    del values["input"]  # it may be much larger than the messages in it, and the rest is kept for the answer
    return AskedResponse(values, messages)


def job_of(
    asked: AskedResponse, history: Sequence[Mapping[str, str]], limits: Limits, *, timings: bool
) -> ParsedRequest:
    """Make the job of a response. Its prompt is the instructions, then `history` (the messages of earlier responses),
    then the input's messages. Raises InvalidArgument, Unsupported."""
    values = asked.values
    messages = [*history, *asked.messages]
    if values["instructions"]:
        messages.insert(0, {"role": "system", "content": values["instructions"]})
    kwargs = dict(values["chat_template_kwargs"] or {})
    effort = (values["reasoning"] or {}).get("effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
    prompt = ChatPrompt(
        messages_json=json_text("input", messages),
        template_kwargs_json=json_text("chat_template_kwargs", kwargs) if kwargs else "",
    )
    with_logprobs = LOGPROBS in values["include"]
    shared = {name: value for name, value in values.items() if name in SAMPLING}
    truncates = {"truncate_prompt_tokens": -1 if values["truncation"] == "auto" else None}
    return job_request(
        {**check_fields({}, SAMPLING, limits.sampling_defaults({})), **shared, **truncates},
        limits,
        prompts=(prompt,),
        logprobs=(values["top_logprobs"] or 0) if with_logprobs else -1,
        logprobs_param="top_logprobs",
        max_tokens=None,
        default_max_tokens=values["max_output_tokens"] or limits.max_tokens,
        timings=timings,
    )


def _messages(given: Any) -> list[dict[str, str]]:
    """Convert the input, a string or a list of items, to messages. Raises InvalidArgument, Unsupported."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad_type("input", given, "a string or a list of items")
    if not given:
        raise InvalidArgument("MISSING_FIELD", "input is an empty list.", "Send an item.", param="input")
    return [_message(item, f"input[{i}]") for i, item in enumerate(given)]


def _message(item: Any, name: str) -> dict[str, str]:
    """Convert one item of the input to a message; the role `developer` becomes `system`. Raises InvalidArgument,
    Unsupported."""
    if not isinstance(item, dict):
        raise bad_type(name, item, "an object")
    if item.get("type", "message") != "message":
        raise unsupported(name, ", an item of a type other than message,")
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidArgument(
            "BAD_ROLE", f"{name}.role is none of {', '.join(_ROLES)}.", "Choose one of them.", param=f"{name}.role"
        )
    content = item.get("content")
    if isinstance(content, str):
        return {"role": _ROLES[role], "content": content}
    if not isinstance(content, list):
        raise bad_type(f"{name}.content", content, "a string or a list of parts")
    texts = [_text(part, f"{name}.content[{i}]") for i, part in enumerate(content)]
    return {"role": _ROLES[role], "content": "".join(texts)}


def _text(part: Any, name: str) -> str:
    """Return the text of one part of an item. Raises InvalidArgument, and Unsupported for parts other than text."""
    if not isinstance(part, dict):
        raise bad_type(name, part, "an object")
    if part.get("type") not in _TEXT_PARTS:
        raise unsupported(name, ", a part of a type other than text,")
    if not isinstance(part.get("text"), str):
        raise bad_type(f"{name}.text", part.get("text"), "a string")
    return str(part["text"])

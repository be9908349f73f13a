"""Converts between Python objects and the contract quire.v1.Inference: builds requests, and decodes responses and
errors.

The clients pass protobuf messages on, and `GenerateCall` makes the requests that resume a choice; no other module of
the client converts messages. This module opens no channel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, SupportsIndex

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from quire import errors
from quire.columns import pack_i32, unpack_i32
from quire.outputs import Delta, HopTiming, Logprob, ModelCard, TokenLogprobs, ToolCallDelta, Usage
from quire.prompts import ChatPrompt, Prompt, cache_salt_of, normalise
from quire.request_parameters import NUMBERS
from quire.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.v1 import common_pb2, inference_pb2

_BY_STATUS: dict[int, type[errors.QuireError]] = {
    grpc.StatusCode.CANCELLED.value[0]: errors.Aborted,
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: errors.InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: errors.DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND.value[0]: errors.NotFound,
    grpc.StatusCode.PERMISSION_DENIED.value[0]: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: errors.Overloaded,
    grpc.StatusCode.FAILED_PRECONDITION.value[0]: errors.FailedPrecondition,
    grpc.StatusCode.ABORTED.value[0]: errors.Aborted,
    grpc.StatusCode.UNIMPLEMENTED.value[0]: errors.Unsupported,
    grpc.StatusCode.UNAVAILABLE.value[0]: errors.Unavailable,
    grpc.StatusCode.UNAUTHENTICATED.value[0]: errors.Unauthenticated,
}
_FINISH = {
    number: name.removeprefix("FINISH_REASON_").lower() for name, number in common_pb2.FinishReason.items() if number
}

_MODES = {
    "auto": inference_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": inference_pb2.TOOL_CHOICE_MODE_NONE,
    "required": inference_pb2.TOOL_CHOICE_MODE_REQUIRED,
}

# gRPC's own words for a message beyond a limit, of the client or of the server.
_TOO_LARGE = "message larger than max"

# Thirty days, as routers have it.
MAX_TIMEOUT_S = 30 * 86_400


@contextmanager
def _refuse_surrogates() -> Iterator[None]:
    """Within the context, turn the error of a text that UTF-8 cannot encode into InvalidArgument."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise errors.InvalidArgument(
            "BAD_TEXT",
            f"Character {error.start} of a text of the request is half of a surrogate pair, which UTF-8 cannot encode.",
            "Repair the text: text.encode('utf-8', 'replace').decode('utf-8').",
        ) from error


@_refuse_surrogates()
def build_request(
    prompt: Prompt,
    params: SamplingParams,
    *,
    request_id: str,
    model: str = "",
    priority: int = 0,
    timeout_s: float = 0.0,
    cache_salt: str = "",
    return_token_ids: bool = False,
    return_timings: bool = False,
    beams: BeamSearchParams | None = None,
) -> inference_pb2.GenerateRequest:
    """Return the protobuf request for a prompt and its parameters. A `cache_salt` wins over the prompt's own. `beams`:
    the request is a beam search, and `params` are its other parameters. If `max_tokens` is None, the answer may fill
    the context. `timeout_s`: at most 30 days; 0: no limit of the client's. Raises InvalidArgument for an invalid
    prompt, tool choice, `timeout_s` or `priority`, token ids beyond int32, values that JSON does not have, and a text
    with half of a surrogate pair, which UTF-8 cannot encode."""
    asked = normalise(prompt)
    if not isinstance(priority, SupportsIndex) or not -(2**31) <= priority.__index__() < 2**31:
        raise errors.InvalidArgument(
            "BAD_PRIORITY", f"priority is {priority!r:.40}.", "Choose an integer of 32 bits.", param="priority"
        )
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        raise errors.InvalidArgument(
            "BAD_TIMEOUT",
            f"timeout_s is {timeout_s:g}.",
            f"Choose 0, which is no limit of the client's, to {MAX_TIMEOUT_S} seconds.",
            param="timeout_s",
        )
    request = inference_pb2.GenerateRequest(
        model=model,
        kind=common_pb2.REQUEST_KIND_GENERATE,
        sampling=_sampling(params),
        n=params.n,
        min_tokens=params.min_tokens,
        stop=params.stop_strings,
        stop_token_ids=pack_i32(params.stop_token_ids or (), "stop_token_ids"),
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        priority=priority,
        request_id=request_id,
        return_token_ids=return_token_ids,
        return_timings=return_timings,
        timeout_ms=round(timeout_s * 1000),
        cache_salt=cache_salt or cache_salt_of(prompt),
        bad_words=params.bad_words or (),
        # The contract's default is 16 for text, OpenAI's; vLLM's users mean the rest of the context.
        fill_context=params.max_tokens is None,
    )
    if params.max_tokens is not None:
        request.max_tokens = params.max_tokens
    if params.best_of is not None:
        request.best_of = params.best_of
    if beams is not None:
        request.beam_search.length_penalty = beams.length_penalty
    if params.truncate_prompt_tokens is not None:
        request.truncate_prompt_tokens = params.truncate_prompt_tokens
    if params.thinking_token_budget is not None:
        request.thinking_token_budget = params.thinking_token_budget
    if params.repetition_detection is not None:
        rule = params.repetition_detection
        request.repetition_detection.max_pattern_size = rule.max_pattern_size
        request.repetition_detection.min_pattern_size = rule.min_pattern_size
        request.repetition_detection.min_count = rule.min_count
    if params.structured_outputs is not None:
        request.constraint.CopyFrom(_constraint(params.structured_outputs))
    if isinstance(asked, str):
        request.text = asked
    elif isinstance(asked, ChatPrompt):
        request.chat.CopyFrom(_chat(asked))
        _add_tool_choice(request, asked)
    else:
        request.token_ids.ids = pack_i32(asked, "prompt")
    return request


def read_response(response: inference_pb2.GenerateResponse, request_id: str) -> Delta:
    """Decode one response of a stream to a Delta; `request_id` is used if the response has none. Raises the typed error
    if the response carries one."""
    if response.HasField("error"):
        raise _from_message(response.error, response.request_id or request_id)
    stopped_by = response.WhichOneof("stopped_by")
    usage = response.usage
    return Delta(
        request_id=response.request_id or request_id,
        index=response.index,
        text=response.text,
        token_ids=tuple(unpack_i32(response.token_ids)),
        logprobs=tuple(_logprobs(entry) for entry in response.logprobs),
        finish_reason=_FINISH.get(response.finish_reason),
        stop_reason=getattr(response, stopped_by) if stopped_by else None,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens)
        if response.HasField("usage")
        else None,
        timings=tuple(HopTiming(t.service, t.phase, t.us, t.count, t.instance) for t in response.timings),
        prompt_token_ids=tuple(unpack_i32(response.prompt_token_ids)),
        prompt_logprobs=tuple(_logprobs(entry) for entry in response.prompt_logprobs),
        reasoning=response.reasoning,
        tool_calls=tuple(ToolCallDelta(c.index, c.id, c.name, c.arguments) for c in response.tool_calls),
        hidden_characters=response.hidden_characters,
    )


def read_model(model: common_pb2.ModelInfo) -> ModelCard:
    """Return the ModelCard of a served model; its sampling defaults are those that the message sets."""
    return ModelCard(
        model.name,
        model.architecture,
        model.max_model_len,
        model.vocab_size,
        model.parameters,
        tuple(model.capabilities),
        tuple(unpack_i32(model.eos_token_ids)),
        {field.name: value for field, value in model.sampling_defaults.ListFields()},
    )


def read_error(error: grpc.RpcError, address: str, request_id: str = "") -> errors.QuireError:
    """Return the typed error of a failed call. If the service sent a google.rpc.Status, its code, cause and fix are
    taken. Otherwise, or if the Status cannot be decoded, the gRPC status code decides: UNAVAILABLE becomes UNREACHABLE.
    A message beyond gRPC's limit becomes MESSAGE_TOO_LARGE, an InvalidArgument, because another attempt would fail too.
    Other status codes keep their name, and are Internal unless an error class stands for them."""
    metadata: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in metadata or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            with suppress(DecodeError):
                return _from_status(status_pb2.Status.FromString(value), request_id)
    status = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = (error.details() if hasattr(error, "details") else None) or "no details"
    if status is grpc.StatusCode.UNAVAILABLE:
        return errors.Unavailable(
            "UNREACHABLE",
            f"Nothing answers at {address}: {details}.",
            "Check the address; `quire status` shows what runs here, `quire up` starts it.",
            request_id=request_id,
        )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return errors.InvalidArgument(
            "MESSAGE_TOO_LARGE",
            f"The request to {address}, or its answer, is too large for gRPC: {details}.",
            "Send a shorter prompt or ask for fewer logprobs, or raise --max-body-bytes of the router.",
            request_id=request_id,
        )
    cls = _BY_STATUS.get(status.value[0], errors.Internal)
    return cls(
        status.name, f"{address} answered {status.name}: {details}.", "See the service's log.", request_id=request_id
    )


def _from_status(status: status_pb2.Status, request_id: str) -> errors.QuireError:
    """Return the typed error that a google.rpc.Status describes: ErrorInfo has code, fix, parameter and request id,
    RetryInfo the seconds to wait. `request_id` is used if ErrorInfo has none. Without ErrorInfo, the code is UNKNOWN. A
    status for which no class stands is Internal."""
    code, fix, param, retry_after_s = "UNKNOWN", "", "", 0.0
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            code, fix, param = info.reason, info.metadata.get("fix", ""), info.metadata.get("param", "")
            request_id = info.metadata.get("request_id", "") or request_id
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    cls = _BY_STATUS.get(status.code, errors.Internal)
    return cls(code, status.message, fix, param=param, request_id=request_id, retry_after_s=retry_after_s)


def _from_message(message: common_pb2.RequestError, request_id: str) -> errors.QuireError:
    """Return the typed error for the RequestError of a response; its gRPC code chooses the class, Internal if it is
    unknown."""
    cls = _BY_STATUS.get(message.grpc_code, errors.Internal)
    return cls(
        message.code,
        message.message,
        message.fix,
        param=message.param,
        request_id=request_id,
        retry_after_s=message.retry_after_s,
    )


def _sampling(params: SamplingParams) -> common_pb2.SamplingParams:
    """Encode the sampling parameters. A seed that is None or negative, and logprobs that are None, are left out."""
    message = common_pb2.SamplingParams(
        **_numbers(params),
        logit_bias=dict(params.logit_bias or {}),
        allowed_token_ids=pack_i32(params.allowed_token_ids or (), "allowed_token_ids"),
        logits_processors=params.logits_processors or (),
    )
    if params.seed is not None and params.seed >= 0:
        message.seed = params.seed
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.prompt_logprobs is not None:
        message.prompt_logprobs = params.prompt_logprobs
    return message


def _constraint(asked: StructuredOutputsParams) -> common_pb2.Constraint:
    """Encode the structured outputs that a request asks for as the contract's constraint: kind, text and options."""
    return common_pb2.Constraint(
        kind=asked.kind,
        text=asked.text,
        strict=asked.strict,
        disable_any_whitespace=asked.disable_any_whitespace,
        disable_additional_properties=asked.disable_additional_properties,
        whitespace_pattern=asked.whitespace_pattern or "",
    )


def _numbers(params: SamplingParams) -> dict[str, Any]:
    """Return the numeric sampling parameters by name. Defaults that routers need not be told are left out, and a
    negative top_k becomes 0."""
    asked = ((each, getattr(params, each.name)) for each in NUMBERS)
    told = ((each, value) for each, value in asked if each.always_sent or value != each.default)
    return {each.name: max(value, 0) if each.kind == "int" else value for each, value in told}


def _chat(prompt: ChatPrompt) -> inference_pb2.Chat:
    """Encode a conversation: messages, tools and template arguments as JSON texts. Raises InvalidArgument for values
    that JSON does not have."""
    return inference_pb2.Chat(
        messages_json=_json(list(prompt.messages), "messages"),
        tools_json=_json(list(prompt.tools), "tools") if prompt.tools else "",
        template_kwargs_json=_json(dict(prompt.template_kwargs), "chat_template_kwargs")
        if prompt.template_kwargs
        else "",
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        chat_template=prompt.chat_template,
    )


def _add_tool_choice(request: inference_pb2.GenerateRequest, prompt: ChatPrompt) -> None:
    """Write a conversation's tool choice into the request; a named function is sent as required with its name, and auto
    is not sent. Also writes that calls may not be parallel, or that reasoning and, if there are tools, tool calls come
    apart from the text, if the prompt says so. Raises InvalidArgument for another choice."""
    choice = prompt.tool_choice
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(choice, str) and choice in _MODES:
        if choice != "auto":
            request.tool_choice.mode = _MODES[choice]
    elif isinstance(name, str) and name:
        request.tool_choice.mode, request.tool_choice.name = _MODES["required"], name
    else:
        raise errors.InvalidArgument(
            "BAD_TOOL_CHOICE",
            f"tool_choice is {str(choice)[:50]}.",
            'Give auto, none, required, or {"type": "function", "function": {"name": ...}}.',
            param="tool_choice",
        )
    if not prompt.parallel_tool_calls:
        request.parallel_tool_calls = False
    if prompt.separate:
        request.parts.reasoning, request.parts.tool_calls = True, bool(prompt.tools)


def _json(value: object, param: str) -> str:
    """Encode a value as JSON. Raises InvalidArgument, naming `param`, for a value that cannot be encoded."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument(
            "BAD_JSON", f"{param} is not JSON: {error}.", "Use dicts, lists, strings and numbers.", param=param
        ) from error


def _logprobs(entry: inference_pb2.TokenLogprob) -> TokenLogprobs:
    """Decode a position's logprobs: the chosen token, and its alternatives ranked from 1 in the order sent. The chosen
    token keeps its own rank if it is among the alternatives."""
    candidates = {entry.token_id: Logprob(entry.logprob, entry.rank or None, _text(entry.token), entry.token)}
    for rank, top in enumerate(entry.top, start=1):
        candidates.setdefault(top.token_id, Logprob(top.logprob, rank, _text(top.token), top.token))
    return TokenLogprobs(entry.token_id, entry.logprob, candidates)


def _text(token: bytes) -> str:
    """Decode the bytes of a token. A token may be a part of a character; an invalid byte becomes the replacement
    character."""
    return token.decode("utf-8", "replace")

"""The OpenAPI document: every operation of the public port, its body and its answers. Tests compare it with the
routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire_common.version import installed_version
from quire_router.front.http.console import action_fields
from quire_router.front.http.formats.error_shape import ANTHROPIC_PREFIX
from quire_router.front.http.open_paths import CONSOLE_FILES, LIVE_PATHS, READY_PATHS
from quire_router.front.http.openapi.answers import ANSWERS
from quire_router.front.http.openapi.event_answers import EVENT_ANSWERS
from quire_router.front.http.openapi.schemas import STRING, body_schema, either, ref
from quire_router.front.parameters import tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_router.front.http.openapi.schemas import Schema

_REQUESTS: Mapping[str, Schema] = {
    "CompletionRequest": body_schema(tables.COMPLETION, ["prompt"]),
    "ChatCompletionRequest": body_schema(tables.CHAT, ["messages"]),
    "InvocationRequest": either(ref("ChatCompletionRequest"), ref("CompletionRequest")),
    "Invocation": either(ref("ChatCompletion"), ref("Completion")),
    "InvocationChunk": either(ref("ChatCompletionChunk"), ref("CompletionChunk")),
    "StreamOptions": body_schema(tables.STREAM_OPTIONS),
    "KvTransferParams": body_schema(tables.KV_TRANSFER),
    "SamplingParams": body_schema(tables.SAMPLING_PARAMS),
    "TokenRequest": body_schema(tables.GENERATE, ["token_ids", "sampling_params"]),
    "TokenizeText": body_schema(tables.TOKENIZE, ["prompt"]),
    "TokenizeChat": body_schema(tables.TOKENIZE_CHAT, ["messages"]),
    "TokenizeRequest": either(ref("TokenizeText"), ref("TokenizeChat")),
    "DetokenizeRequest": body_schema(tables.DETOKENIZE, ["tokens"]),
    "MessageRequest": body_schema(tables.MESSAGES, ["messages", "max_tokens"]),
    "CountRequest": body_schema(tables.COUNT_TOKENS, ["messages"]),
    "ResponseRequest": body_schema(tables.RESPONSES, ["input"]),
    "ConsoleCancel": body_schema(action_fields.CANCEL, ["number", "request_id"]),
    "ConsoleDrain": body_schema(action_fields.DRAIN, ["instance"]),
    "ConsoleRole": body_schema(action_fields.ROLE, ["instance", "role"]),
    "ConsoleRouter": body_schema(action_fields.ROUTER),
}
_FILE_TYPES = {"/console": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Operation:
    """`answer` and `events` name schemas; an operation without `answer` has no body in its answer. `also` has other
    statuses with a body."""

    method: str
    path: str
    summary: str
    answer: str = ""
    body: str = ""
    events: str = ""
    also: tuple[int, ...] = ()
    content_type: str = "application/json"


OPERATIONS = (
    Operation("POST", "/v1/completions", "Continue a prompt.", "Completion", "CompletionRequest", "CompletionChunk"),
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation.",
        "ChatCompletion",
        "ChatCompletionRequest",
        "ChatCompletionChunk",
    ),
    Operation(
        "POST",
        "/invocations",
        "A chat or a completion, by what the body has.",
        "Invocation",
        "InvocationRequest",
        "InvocationChunk",
    ),
    Operation("POST", "/v1/responses", "OpenAI's Responses.", "Response", "ResponseRequest", "ResponseEvent"),
    Operation("GET", "/v1/responses/{response_id}", "A response that was kept.", "Response"),
    Operation("DELETE", "/v1/responses/{response_id}", "Forget a response.", "ResponseDeleted"),
    Operation("POST", "/v1/responses/{response_id}/cancel", "End one that runs in the background.", "Response"),
    Operation("POST", "/v1/messages", "Anthropic's Messages.", "Message", "MessageRequest", "MessageEvent"),
    Operation("POST", "/v1/messages/count_tokens", "How long a message's input is.", "TokenCount", "CountRequest"),
    Operation("POST", "/inference/v1/generate", "Tokens in, tokens out.", "TokenAnswer", "TokenRequest", "TokenChunk"),
    Operation(
        "POST", "/v1/completions/render", "What would be generated from.", "RenderedRequests", "CompletionRequest"
    ),
    Operation(
        "POST",
        "/v1/chat/completions/render",
        "What would be generated from.",
        "RenderedRequest",
        "ChatCompletionRequest",
    ),
    Operation("POST", "/tokenize", "A text or a conversation as token ids.", "Tokens", "TokenizeRequest"),
    Operation("POST", "/detokenize", "Token ids as a text.", "Detokenized", "DetokenizeRequest"),
    Operation("GET", "/v1/models", "What can be asked for.", "Models"),
    Operation("GET", "/v1/models/{model}", "One of the models.", "Model"),
    Operation("GET", "/version", "Of this service.", "Version"),
    Operation("GET", "/load", "What is in flight.", "Load"),
    *(Operation("GET", path, "The process answers.", "Live") for path in LIVE_PATHS),
    *(
        Operation("GET", path, "What everybody behind the router is doing.", "Ready", also=(503,))
        for path in READY_PATHS
    ),
    Operation("GET", "/health", "Whether a request could be answered."),
    Operation("GET", "/ping", "Whether a request could be answered."),
    Operation("POST", "/ping", "Whether a request could be answered."),
    Operation("GET", "/metrics", "Prometheus' text.", "Text", content_type="text/plain"),
    *(
        Operation(
            "GET", path, "The console, or a file of it.", "Text", content_type=_FILE_TYPES[path.rpartition(".")[2]]
        )
        for path in CONSOLE_FILES
    ),
    Operation("GET", "/console/events", "Snapshots for the console.", "Anything", content_type="text/event-stream"),
    Operation("POST", "/console/cancel", "End a request.", "ConsoleDone", "ConsoleCancel"),
    Operation("POST", "/console/drain", "Let a replica take no new requests.", "ConsoleDone", "ConsoleDrain"),
    Operation("POST", "/console/role", "Change a replica's role.", "ConsoleDone", "ConsoleRole"),
    Operation("POST", "/console/pause", "Admit no new requests.", "ConsoleDone", "ConsoleRouter"),
    Operation("POST", "/console/resume", "Admit requests again.", "ConsoleDone", "ConsoleRouter"),
    Operation("GET", "/openapi.json", "This document.", "Anything"),
    Operation("GET", "/docs", "A page that shows it.", "Text", content_type="text/html"),
)


def openapi_document(open_paths: frozenset[str], paths: frozenset[str]) -> dict[str, Any]:
    """Return the OpenAPI document of those operations whose path is in `paths`. Operations at `open_paths` need no key.
    The schemas of all operations are included."""
    described: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        if operation.path in paths:
            told = _described(operation, secure=operation.path not in open_paths)
            described.setdefault(operation.path, {})[operation.method.lower()] = told
    schemas = {**_REQUESTS, **ANSWERS, **EVENT_ANSWERS, "Text": STRING, "Anything": {}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": installed_version("quire-router")},
        "paths": described,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _described(operation: Operation, *, secure: bool) -> dict[str, Any]:
    """Describe one operation: its path parameters, body and answers. `secure`: it needs a key."""
    told: dict[str, Any] = {"summary": operation.summary, "responses": _answers(operation)}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if names:
        told["parameters"] = [{"name": name, "in": "path", "required": True, "schema": STRING} for name in names]
    if operation.body:
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(operation.body)}}}
    if secure:
        told["security"] = [{"bearer": []}, {"x_api_key": []}]
    return told


def _answers(operation: Operation) -> dict[str, Any]:
    """Describe the answers of one operation by status. Its own answer, also as an event stream if it has `events`, is
    for 200 and each status in `also`. All other statuses have the error of its API."""
    whole: dict[str, Any] = {"description": operation.summary}
    if operation.answer:
        whole["content"] = {operation.content_type: {"schema": ref(operation.answer)}}
        if operation.events:
            whole["content"]["text/event-stream"] = {"schema": ref(operation.events)}
    error = "AnthropicError" if operation.path.startswith(ANTHROPIC_PREFIX) else "Error"
    failed = {"description": "An error.", "content": {"application/json": {"schema": ref(error)}}}
    return {"200": whole, **{str(status): whole for status in operation.also}, "default": failed}

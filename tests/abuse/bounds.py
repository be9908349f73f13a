"""Values of HTTP fields at their bounds, made from the router's own tables, and bodies of such values by route."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator, Mapping
from typing import Any

from quire_common.repetition import MAX_PATTERN_COUNT, MAX_PATTERN_SIZE
from quire_router.front.parameters import tables
from quire_router.front.parameters.fields import Field

VOCABULARY = 4000
LONG_TEXT = "To be, or not to be. " * 4000
TOKENS = [300 + number % 3000 for number in range(1500)]

# Bodies that are taken: what the other fields are added to.
ROUTES: Mapping[str, tuple[Mapping[str, Field], dict[str, Any]]] = {
    "/v1/completions": (tables.COMPLETION, {"prompt": "ABUSE:", "max_tokens": 4}),
    "/v1/chat/completions": (tables.CHAT, {"messages": [{"role": "user", "content": "ABUSE"}], "max_tokens": 4}),
    "/inference/v1/generate": (
        tables.GENERATE,
        {"token_ids": [300, 301], "sampling_params": {"max_tokens": 64}},
    ),
    "/invocations": (tables.COMPLETION, {"prompt": "ABUSE:", "max_tokens": 4}),
    "/v1/responses": (tables.RESPONSES, {"input": "ABUSE", "max_output_tokens": 4}),
    "/v1/messages": (tables.MESSAGES, {"messages": [{"role": "user", "content": "ABUSE"}], "max_tokens": 4}),
    "/v1/messages/count_tokens": (tables.COUNT_TOKENS, {"messages": [{"role": "user", "content": "ABUSE"}]}),
    "/tokenize": (tables.TOKENIZE, {"prompt": "ABUSE"}),
    "/detokenize": (tables.DETOKENIZE, {"tokens": [300, 301]}),
    "/v1/completions/render": (tables.COMPLETION, {"prompt": "ABUSE:", "max_tokens": 4}),
    "/v1/chat/completions/render": (tables.CHAT, {"messages": [{"role": "user", "content": "ABUSE"}]}),
}
# Routes without a body of fields, and the console's, which refuse everybody but administrators before they read a body.
PLAIN = (
    "/v1/responses/{response_id}/cancel",
    "/ping",
    *(f"/console/{action}" for action in ("cancel", "drain", "role", "pause", "resume")),
)

_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        f"name{number}": {"type": "string", "enum": [f"value {number} {value}" for value in range(16)]}
        for number in range(256)
    },
    "required": [f"name{number}" for number in range(256)],
}
# Constraints that an answer must match: a request has one of them.
_CONSTRAINTS: Mapping[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    "structured_outputs": {"json": _SCHEMA},
    "guided_json": _SCHEMA,
    "guided_regex": "([a-z]{1,60} ){1,60}",
    "guided_choice": [f"choice {number}" for number in range(tables.MAX_CHOICES)],
    "guided_grammar": "start: " + " | ".join(f'"word{number}"' for number in range(1000)),
    "output_format": {"type": "json_schema", "schema": _SCHEMA},
    "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
}


def _tools(count: int, form: str) -> list[dict[str, Any]]:
    """Make `count` tools, in the form of Anthropic's messages, of the Responses API or of a chat."""
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "many": {"type": "integer"}}}
    plain = [{"name": f"tool{number}", "description": "d" * 200} for number in range(count)]
    if form == "messages":
        return [{**tool, "input_schema": schema} for tool in plain]
    if form == "responses":
        return [{"type": "function", **tool, "parameters": schema} for tool in plain]
    return [{"type": "function", "function": {**tool, "parameters": schema}} for tool in plain]


_OBJECTS: Mapping[str, Any] = {
    **_CONSTRAINTS,
    "tool_choice": "none",
    "thinking": {"type": "enabled", "budget_tokens": 4096},
    "prompt": [LONG_TEXT[:20_000]] * 32,
    "messages": [{"role": "user", "content": "x" * 40} for _ in range(tables.MAX_MESSAGES)],
    "input": [{"role": "user", "content": "x" * 40} for _ in range(tables.MAX_MESSAGES)],
    "documents": [{"title": "t" * 64, "text": "x" * 512} for _ in range(tables.MAX_DOCUMENTS)],
    "tokens": TOKENS * 60,
    "token_ids": TOKENS,
    "repetition_detection": {
        "max_pattern_size": MAX_PATTERN_SIZE,
        "min_pattern_size": MAX_PATTERN_SIZE // 2,
        "min_count": MAX_PATTERN_COUNT,
    },
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "chat_template_kwargs": {f"name{number}": "v" * 100 for number in range(5000)},
    "metadata": {f"name{number}": "v" * 100 for number in range(5000)},  # where it is a hint
    "system": LONG_TEXT,
    "reasoning": {"effort": "e" * tables.MAX_ID_CHARS},
    "extra_args": {},
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "remote_engine_id": "e" * tables.MAX_ID_CHARS,
        "remote_block_ids": list(range(100_000)),
    },
}


# With these a request is refused, or waits, for a reason that is no bound.
_ALONE = {
    "model", "logits_processors", "previous_response_id", "chat_template", "kv_transfer_params", "temperature",
    "use_beam_search", "continue_final_message", "background", "request_id", "include", "truncation",
    "add_generation_prompt",
}  # fmt: skip
_FITTING = 16
# Where an answer is generated: what its model and the bounds of products leave of a field.
_TAKEN: Mapping[str, Any] = {
    "max_tokens": 64,
    "max_output_tokens": 64,
    "max_completion_tokens": 64,
    "min_tokens": 64,
    "logprobs": 20,
    "top_logprobs": 20,
    "prompt_logprobs": 20,
    "bad_words": [f"word{number}" * 6 for number in range(400)],
    "truncate_prompt_tokens": 1000,
    "system": LONG_TEXT[:8000],
    "instructions": LONG_TEXT[:8000],
    "documents": [{"title": "t" * 8, "text": "x" * 8} for _ in range(64)],
}
_FEW_TOOLS = 64


def at_bound(name: str, field: Field, rng: random.Random) -> Any:
    """A value that the field's own check takes, as large as that allows."""
    if name == "sampling_params":
        return all_fields(tables.SAMPLING_PARAMS, {"max_tokens": 64}, rng)
    match field.kind:
        case "bool":
            return not field.default
        case "int":
            return int(field.high) if math.isfinite(field.high) else 1 << 31
        case "number":
            return field.high if math.isfinite(field.high) else 1e30
        case "string":
            return "".join(rng.choices(string.ascii_letters, k=field.max_items)) if field.max_items else LONG_TEXT
        case "strings":
            chars = int(field.high) if math.isfinite(field.high) else 64
            return ["".join(rng.choices(string.ascii_letters, k=chars)) for _ in range(field.max_items)]
        case "ints":
            return [300 + rng.randrange(3000) for _ in range(field.max_items)]
        case "biases":
            return {str(token): 1.0 for token in range(min(field.max_items, VOCABULARY))}
        case "texts":
            return {"n" * 62 + f"{number:02d}": "v" * int(field.high) for number in range(field.max_items)}
        case "list" if name == "tools":
            return _tools(tables.MAX_TOOLS, "chat")
        case "list" | "object" | "any":
            return _OBJECTS.get(name, "x" * 10_000)
    raise ValueError(field.kind)


def all_fields(
    table: Mapping[str, Field], base: Mapping[str, Any], rng: random.Random, siblings: int = _FITTING
) -> dict[str, Any]:
    """Everything at once but what would refuse the rest for a reason that is no bound. With FITTING siblings it is
    taken, with more its products are too large."""
    chosen = {n: f for n, f in table.items() if f.supported and n not in _ALONE}
    body = {n: at_bound(n, f, rng) for n, f in chosen.items()}
    if {"max_tokens", "max_output_tokens", "token_ids"} & set(table):  # else nothing is generated: the text may be long
        body |= {name: value for name, value in base.items() if name != "sampling_params"}
        body |= {name: value for name, value in _TAKEN.items() if name in body and table[name].kind != "bool"}
    body |= {name: siblings for name in ("n", "best_of") if name in body}
    constraints = sorted(_CONSTRAINTS.keys() & body)
    constraint = rng.choice(constraints) if constraints and rng.random() < 0.5 else ""
    for name in (*_CONSTRAINTS, "guided_whitespace_pattern"):
        body.pop(name, None)
    if constraint:
        body[constraint] = _CONSTRAINTS[constraint]
        body |= {name: False for name in ("ignore_eos",) if name in body}
    if "tools" in body:
        form = "messages" if "output_format" in table else "responses" if "text" in table else "chat"
        body["tools"] = _tools(_FEW_TOOLS, form)
        body["tool_choice"] = {"type": "none"} if form == "messages" else "none"
    if "prompt_logprobs" in body and rng.random() < 0.5:  # one excludes the other
        del body["prompt_logprobs"]
        body.pop("echo", None)
    else:
        body |= {name: False for name in ("stream",) if name in body}
        body.pop("stream_options", None)
    return body


def each_field(rng: random.Random) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Route, field, and a body with that field at its bound."""
    for route, (table, base) in ROUTES.items():
        for name, field in table.items():
            if field.supported:
                yield route, name, {**base, name: at_bound(name, field, rng)}

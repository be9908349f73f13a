"""Writes docs/limits.md: every field that a client can send, its bound, and what its cost grows with.

Bounds of HTTP fields come from the tables that check requests. `python -m tools.limits_table` writes the file. A test
fails if the file is out of date, or if a field has no cost class.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quire.v1 import inference_pb2
from quire_common.request_parameters import PARAMETERS
from quire_common.structured.constraint import MAX_GRAMMAR_BYTES
from quire_common.telemetry.metrics_server import MAX_CONNECTIONS
from quire_router.front.grpc.smg.request_codec import MAX_ABORTED
from quire_router.front.http.bodies.body_parser import LONG_BYTES, MAX_CPU_S
from quire_router.front.http.parsing.prompts import MAX_PROMPTS
from quire_router.front.parameters import tables
from quire_router.front.parameters.fields import MAX_INT32, MAX_NAME_CHARS, Field
from quire_router.requests import products
from quire_tokenizer.grammar.grammar_compiler import MAX_SOURCE_BYTES
from quire_tokenizer.grammar.grammar_source import MAX_DEPTH

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

DOCUMENT = Path(__file__).parent.parent / "docs" / "limits.md"

CLASSES = {
    "once": "Quire checks or copies the value once per request. The cost does not depend on the value.",
    "bytes": "The cost grows with the size of the value in bytes. `--max-body-bytes` limits this size.",
    "prompt": "The cost grows with the number of prompt tokens.",
    "sequence": "The cost grows with the number of the request's answers. Each answer is a *sequence*.",
    "token": "The value costs some microseconds for each generated token of each answer.",
    "answer": "The cost grows with the number of generated tokens, or with the data that is returned for each token.",
    "none": "The field costs nothing, because Quire ignores or refuses the field.",
}

_LONG_KIB = LONG_BYTES >> 10
_BODY = "no limit of its own; `--max-body-bytes` limits the whole body"
_CONTEXT = "at most the model's context length"
_OBJECT = "an object; this table has a row for each field of the object"
_REFUSED = "not supported: refused"
_UINT32 = "0 to 2^32 - 1"
_SOURCE = f"at most {MAX_SOURCE_BYTES >> 20} MiB, and at most {MAX_GRAMMAR_BYTES >> 10} KiB after compilation"
_SCHEMA = f"{_SOURCE}; nested at most {MAX_DEPTH} deep"


def bound_of(field: Field) -> str:
    """Return the bound in a table of fields."""
    if field.kind == "bool":
        return "true or false"
    if field.kind in ("strings", "texts"):
        strings = f"at most {field.max_items:,} strings of at most {field.high:,.0f} characters"
        return strings if field.kind == "strings" else f"{strings}, with names of at most {MAX_NAME_CHARS} characters"
    if field.kind == "string":
        return f"at most {field.max_items:,} characters" if field.max_items else _BODY
    if field.kind in ("ints", "list", "biases"):
        return f"at most {field.max_items:,} entries"
    if field.kind in ("int", "number") and math.inf in (field.high, -field.low):
        return f"{field.low:g} or more"
    if field.kind in ("int", "number"):
        return f"{_number(field.low)} to {_number(field.high)}"
    return ""


def _number(value: float) -> str:
    if abs(value) == MAX_INT32:
        return "-2^31 + 1" if value < 0 else "2^31 - 1"
    if value in (-(2**63), 2**64 - 1):
        return "-2^63" if value < 0 else "2^64 - 1"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 2**63 else f"{value:g}"


_ECHOED = f"for `/v1/responses` {bound_of(tables.RESPONSES['user'])}, elsewhere {_BODY}"
# By field: the cost class, and the bound where the table of fields does not say all of it.
FIELDS: Mapping[str, tuple[str, str]] = {
    **{each.name: (each.cost, each.limit) for each in PARAMETERS},
    "add_generation_prompt": ("once", ""),
    "add_special_tokens": ("once", ""),
    "background": ("once", ""),
    "choice": ("bytes", ""),
    "beam_search": ("sequence", "`n`, the number of beams, is at most `--max-n`"),
    "best_of": ("sequence", "at most `--max-n`"),
    "budget_tokens": ("token", ""),
    "cache_salt": ("sequence", ""),
    "chat_template": ("prompt", ""),
    "chat_template_kwargs": ("prompt", f"{_BODY}; nested at most 100 deep"),
    "continue_final_message": ("once", ""),
    "continuous_usage_stats": ("answer", ""),
    "description": ("bytes", _BODY),
    "detokenize": ("none", "any value, which Quire ignores: the route returns token ids"),
    "disable_additional_properties": ("once", ""),
    "disable_any_whitespace": ("once", ""),
    "disable_fallback": ("none", _BODY),
    "do_remote_decode": ("once", ""),
    "do_remote_prefill": ("once", ""),
    "documents": ("prompt", ""),
    "echo": ("answer", ""),
    "effort": ("once", ""),
    "extra_args": ("once", "an object that contains only kv_transfer_params"),
    "fill_context": ("answer", ""),
    "format": ("once", _OBJECT),
    "grammar": ("bytes", _SOURCE),
    "guided_choice": ("token", ""),
    "guided_grammar": ("token", _SOURCE),
    "guided_json": ("token", _SCHEMA),
    "guided_regex": ("token", _SOURCE),
    "guided_whitespace_pattern": ("bytes", _SOURCE),
    "include": ("once", "at most 16 values of OpenAI's API, of which only message.output_text.logprobs has an effect"),
    "include_reasoning": ("once", ""),
    "include_usage": ("once", ""),
    "inference_geo": ("none", _BODY),
    "input": ("prompt", _CONTEXT),
    "instructions": ("prompt", _CONTEXT),
    "json": ("bytes", _SCHEMA),
    "json_object": ("once", ""),
    "json_schema": ("once", _OBJECT),
    "kind": ("once", "only GENERATE"),
    "kv_transfer_params": ("once", _OBJECT),
    "max_completion_tokens": ("answer", _CONTEXT),
    "max_output_tokens": ("answer", _CONTEXT),
    "max_pattern_size": ("token", ""),
    "messages": ("prompt", f"at most {tables.MAX_MESSAGES:,} messages; in all {_CONTEXT}"),
    "metadata": ("once", f"for `/v1/responses` {bound_of(tables.RESPONSES['metadata'])}, elsewhere {_BODY}"),
    "min_count": ("token", ""),
    "min_pattern_size": ("token", ""),
    "model": ("once", ""),
    "name": ("once", ""),
    "output_config": ("once", _OBJECT),
    "output_format": ("token", _OBJECT),
    "parallel_tool_calls": ("once", ""),
    "previous_response_id": ("prompt", ""),
    "priority": ("once", ""),
    "prompt_end": ("once", "`unknown`, `thinking` or `answering`"),
    "prompt": ("prompt", f"at most {MAX_PROMPTS:,} prompts, each {_CONTEXT}"),
    "prompt_cache_key": ("once", _ECHOED),
    "prompt_cache_retention": ("none", _BODY),
    "reasoning": ("once", _OBJECT),
    "reasoning_effort": ("once", ""),
    "remote_block_ids": ("bytes", ""),
    "remote_engine_id": ("once", ""),
    "remote_host": ("once", ""),
    "remote_num_tokens": ("once", ""),
    "remote_port": ("once", ""),
    "remote_request_id": ("once", ""),
    "repetition_detection": ("token", _OBJECT),
    "request_id": ("once", ""),
    "regex": ("bytes", _SOURCE),
    "response_format": ("token", _OBJECT),
    "resume": ("prompt", _CONTEXT),
    "return_timings": ("once", ""),
    "return_token_ids": ("answer", ""),
    "return_token_strs": ("answer", ""),
    "return_tokens_as_token_ids": ("answer", ""),
    "safety_identifier": ("once", _ECHOED),
    "sampling_params": ("once", _OBJECT),
    "schema": ("bytes", _SCHEMA),
    "service_tier": ("none", _BODY),
    "stop_sequences": ("sequence", ""),
    "store": ("answer", ""),
    "stream": ("answer", ""),
    "stream_options": ("once", _OBJECT),
    "strict": ("once", ""),
    "structural_tag": ("bytes", _SCHEMA),
    "structured_outputs": ("token", _OBJECT),
    "structures": ("bytes", ""),
    "system": ("prompt", _CONTEXT),
    "text": ("once", _OBJECT),
    "thinking": ("token", _OBJECT),
    "timeout_s": ("once", ""),
    "token_ids": ("prompt", _CONTEXT),
    "tokens": ("bytes", _BODY),
    "tool_choice": ("token", "none, auto, required, or one function by its name"),
    "tools": ("prompt", f"at most {tables.MAX_TOOLS:,} functions, nested at most 100 deep; in all {_CONTEXT}"),
    "top_logprobs": ("answer", "at most `--max-logprobs`"),
    "tp_size": ("once", ""),
    "triggers": ("bytes", ""),
    "truncation": ("prompt", ""),
    "type": ("once", "text, json_object, json_schema or structural_tag; of `thinking`: enabled, adaptive or disabled"),
    "whitespace_pattern": ("bytes", _SOURCE),
    "user": ("once", _ECHOED),
}
# Fields of the gRPC contract that HTTP calls otherwise, or that one of another meaning is called alike.
RPC_FIELDS: Mapping[str, tuple[str, str]] = {
    "GenerateRequest.text": ("prompt", _CONTEXT),
    "GenerateRequest.chat": ("prompt", _OBJECT),
    "GenerateRequest.sampling": ("once", _OBJECT),
    "GenerateRequest.constraint": ("token", _OBJECT),
    "GenerateRequest.adapter": ("none", _REFUSED),
    "GenerateRequest.media": ("none", _REFUSED),
    "GenerateRequest.timeout_ms": ("once", _UINT32),
    "GenerateRequest.tool_choice": ("once", _OBJECT),
    "ToolChoice.mode": ("once", "auto, none or required"),
    "ToolChoice.name": ("once", "the name of one of the tools"),
    "GenerateRequest.parallel_tool_calls": ("once", "true or false"),
    "GenerateRequest.parts": ("token", _OBJECT),
    "AnswerParts.reasoning": ("token", "true or false"),
    "AnswerParts.tool_calls": ("token", "true or false"),
    "TokenIds.ids": ("prompt", _CONTEXT),
    "Chat.messages_json": (
        "prompt",
        f"at most {tables.MAX_MESSAGES:,} messages, nested at most 100 deep; in all {_CONTEXT}",
    ),
    "Chat.tools_json": (
        "prompt",
        f"at most {tables.MAX_TOOLS:,} tools and {tables.MAX_TOOLS_CHARS:,} characters, nested at most 100 deep; "
        f"in all {_CONTEXT}",
    ),
    "Chat.template_kwargs_json": ("prompt", "nested at most 100 deep"),
    "SamplingParams.sample": ("once", _UINT32),
    "SamplingParams.bad_words_ids": ("none", "refused; send bad_words instead"),
    "LogitBiasEntry.key": ("token", "a token id of the vocabulary"),
    "LogitBiasEntry.value": ("token", "-100 to 100"),
    "Constraint.kind": ("once", "json_schema, json_object, regex, choice, grammar or structural_tag"),
    "Constraint.text": ("bytes", _SCHEMA),
    "Constraint.digest": ("none", "refused; only tokenizers set this field"),
    "Constraint.strict": ("once", "true or false"),
    "Constraint.disable_any_whitespace": ("once", "true or false"),
    "Constraint.disable_additional_properties": ("once", "true or false"),
    "Constraint.whitespace_pattern": ("bytes", _SOURCE),
    "Constraint.version": ("none", "ignored in requests; only tokenizers set this field"),
    "MediaBlob.digest": ("none", _REFUSED),
    "MediaBlob.mime_type": ("none", _REFUSED),
    "MediaBlob.data": ("none", _REFUSED),
    "Resume.output_ids": ("prompt", "at most max_tokens"),
    "Resume.characters": ("once", _UINT32),
}

# Names of products, and how large each may be.
_PRODUCTS = (
    ("bytes of stop strings and stop_token_ids x sequences", products.MAX_STOP_BYTES),
    ("bytes of the compiled grammar x sequences", products.MAX_GRAMMARS_BYTES),
    ("entries of logit_bias, allowed_token_ids and bad_words x sequences", products.MAX_CONTROL_VALUES),
    ("tokens of all prompts x max(n, best_of)", products.MAX_PROMPT_TOKENS),
    ("tokens of all prompts x n, with echo or return_token_ids", products.MAX_TOLD_PROMPT_TOKENS),
    ("tokens of all prompts and their longest answers x n, with beam search", products.MAX_BEAM_TOKENS),
    ("tokens of all prompts x logprobs per token x n, with prompt_logprobs", products.MAX_PROMPT_ALTERNATIVES),
    ("tokens of all answers x logprobs per token x max(n, best_of), with logprobs", products.MAX_ALTERNATIVES),
)


def http_fields() -> dict[str, list[Field]]:
    """Return the fields of all tables by name."""
    found: dict[str, list[Field]] = {}
    for table in vars(tables).values():
        if isinstance(table, Mapping):
            for name, field in table.items():
                if isinstance(field, Field):
                    found.setdefault(name, []).append(field)
    return found


def rpc_fields() -> dict[str, str]:
    """Return `Message.field` of all fields that requests of the public contract may contain, with the field's own
    name."""
    found: dict[str, str] = {}

    def walk(message: Descriptor) -> None:
        for field in message.fields:
            key = f"{message.name}.{field.name}"
            if key not in found:
                found[key] = field.name
                if field.message_type is not None:
                    walk(field.message_type)

    for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods:
        walk(method.input_type)
    return found


def row(name: str) -> tuple[str, str, str]:
    """Return field, bound and cost class. Raises KeyError for a field without a class."""
    fields = [field for field in http_fields()[name] if field.supported]
    if not fields:
        return name, "not supported: refused unless the value has no effect", "none"
    cost, text = FIELDS[name]
    bounds = text or next(bound for field in fields if (bound := bound_of(field)))
    return name, bounds, cost


def rpc_row(key: str, name: str) -> tuple[str, str, str]:
    """Return field, bound and cost class of a field of the gRPC contract."""
    if key in RPC_FIELDS:
        cost, bound = RPC_FIELDS[key]
        return key, bound, cost
    cost, bound = FIELDS[name]
    if not bound:
        bound = row(name)[1] if name in http_fields() else "true or false"
    return key, bound, cost


def document() -> str:
    """Return the whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Limits of a request"
    yield ""
    yield "This page is for users. A request has limits, so that no request can slow down the others. If a request"
    yield "exceeds a limit, the error names the field, the cause and the fix. The HTTP status is between 400 and 499,"
    yield "or 503 if the router's memory for HTTP bodies is full. The gRPC status is `INVALID_ARGUMENT` or"
    yield "`RESOURCE_EXHAUSTED`."
    yield ""
    yield "`python -m tools.limits_table` generates this page from the tables with which the router checks requests."
    yield ""
    yield "## Limits of products"
    yield ""
    yield "Some costs grow with the product of two numbers, for example the length of the prompt times `n`. In this"
    yield "table, *sequences* is the number of prompts times `best_of`, or times `n` if the request has no `best_of`."
    yield ""
    yield "| product | at most |"
    yield "|---|---|"
    for product, most in _PRODUCTS:
        yield f"| {product} | {most:,} |"
    yield ""
    yield "The router checks these products before it knows how long an answer becomes. So it calculates with the"
    yield "longest possible answer. The length of this answer is:"
    yield "- `max_tokens`, if the request has it"
    yield "- else the default of the endpoint, if it has one"
    yield (
        "- else the rest of the model's context. Exception: for the product *tokens of all answers x logprobs per "
        "token x max(n, best_of)*, the router calculates with at most "
        f"{products.UNSAID_ANSWER_TOKENS:,} tokens of this rest"
    )
    yield ""
    yield "*Logprobs per token* is 1 for the token itself, plus the requested number of alternatives."
    yield ""
    yield "## Limits of connections, calls and bodies"
    yield ""
    yield "The flags in this table are options of the router. Their defaults are in parentheses."
    yield ""
    yield "| subject | limit |"
    yield "|---|---|"
    yield "| size of an HTTP body or a gRPC request | `--max-body-bytes` (4 MiB) |"
    yield (
        "| memory for all HTTP bodies at the same time; of each body, only the part after the first 64 KiB counts, and "
        "counts twice "
        "| `--max-bodies-mib` (256 MiB); at the limit, a further request gets status 503 |"
    )
    yield "| memory for the HTTP bodies of one tenant, counted alike | half of what the other tenants leave free |"
    yield f"| processor time to parse an HTTP body of more than {_LONG_KIB} KiB | {MAX_CPU_S:g} s |"
    yield "| connections to each public port | `--max-connections` (4,096) |"
    yield f"| connections to the port of `--metrics-listen` | {MAX_CONNECTIONS} |"
    yield "| sequences that wait or run at the same time | `--max-concurrent-requests` (1,024) |"
    yield "| gRPC calls at the same time | `--max-concurrent-requests` + 256 |"
    yield "| size of the HTTP request line and headers; also of the trailers of a chunked body | 64 KiB |"
    yield "| time in which the HTTP headers must arrive | 30 s |"
    yield "| time in which an HTTP body or a gRPC request must arrive | 60 s |"
    yield "| time in which the rest of a request must arrive that was answered before its end | 30 s |"
    yield "| time after which a client that reads nothing of its answer is disconnected | `--client-stall-s` (120 s) |"
    yield f"| requests that one call of Abort may name (with `--vllm-grpc`) | {MAX_ABORTED:,} |"
    yield "| compressed gRPC messages | refused |"
    yield "| requests and tokens of an API key per minute | `--requests-per-minute`, `--tokens-per-minute` |"
    yield (
        "| sequences of an API key that wait or run at the same time | `max_concurrent` in the "
        "[key file](../services/router/README.md#keys) |"
    )
    yield ""
    yield "`--tokens-per-minute` limits the tokens that each API key uses per minute. These are the tokens of"
    yield "prompts, of answers, and of texts for `/tokenize` and similar endpoints. If `truncate_prompt_tokens`"
    yield "shortens a prompt, the removed tokens count too."
    yield ""
    yield "## Cost classes"
    yield ""
    yield "Each field in the tables of HTTP fields and gRPC fields has a cost class. The cost class says on what the"
    yield "field's cost depends:"
    yield ""
    yield "| cost class | meaning |"
    yield "|---|---|"
    for name, text in CLASSES.items():
        yield f"| {name} | {text} |"
    yield ""
    yield "## HTTP fields"
    yield ""
    yield "| field | limit | cost class |"
    yield "|---|---|---|"
    for name in sorted(http_fields()):
        yield "| {} | {} | {} |".format(*row(name))
    yield ""
    yield "## gRPC fields of quire.v1.Inference"
    yield ""
    yield "The column *field* names a protobuf message and one of its fields."
    yield ""
    yield "| field | limit | cost class |"
    yield "|---|---|---|"
    for key, name in rpc_fields().items():
        yield "| {} | {} | {} |".format(*rpc_row(key, name))


def main() -> int:
    """Write the page."""
    DOCUMENT.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes docs/limits.md: every field that a client can send, its bound, and what its cost grows with.

Bounds of HTTP fields come from the tables that requests are checked by. `python -m tools.limits_table` writes the file;
a test fails where it is out of date, and where a field has no cost class.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quire.v1 import inference_pb2
from quire_common.request_parameters import PARAMETERS
from quire_router.front.http.parsing.prompts import MAX_PROMPTS
from quire_router.front.parameters import tables
from quire_router.front.parameters.fields import MAX_INT32, Field
from quire_router.requests import products

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

DOCUMENT = Path(__file__).parent.parent / "docs" / "limits.md"

CLASSES = {
    "once": "Checked or copied once a request, whatever its value.",
    "bytes": "Grows with the bytes of the request, which `--max-body-bytes` bounds.",
    "prompt": "Grows with the tokens of the prompts: encoding, prefill, pages.",
    "sequence": "Paid once for each sequence, of which a request has prompts x n (or best_of).",
    "token": "Paid for each generated token of each sequence, at most some microseconds whatever the value.",
    "answer": "Grows with the tokens that are generated, or with what is told of each.",
    "none": "Taken and ignored, or refused unless it changes nothing.",
}

_BODY = "the body's"
# By field: the cost class, and the bound where the table of fields does not say all of it.
FIELDS: Mapping[str, tuple[str, str]] = {
    **{each.name: (each.cost, each.limit) for each in PARAMETERS},
    "add_generation_prompt": ("once", ""),
    "add_special_tokens": ("once", ""),
    "background": ("once", ""),
    "beam_search": ("sequence", "n beams"),
    "best_of": ("sequence", "`--max-n`"),
    "cache_salt": ("sequence", ""),
    "chat_template": ("prompt", ""),
    "chat_template_kwargs": ("prompt", f"{_BODY}; depth 100"),
    "continue_final_message": ("once", ""),
    "continuous_usage_stats": ("answer", ""),
    "detokenize": ("once", "true"),
    "do_remote_decode": ("once", ""),
    "do_remote_prefill": ("once", ""),
    "documents": ("prompt", ""),
    "echo": ("answer", ""),
    "effort": ("once", ""),
    "extra_args": ("once", "kv_transfer_params alone"),
    "fill_context": ("answer", ""),
    "include": ("once", ""),
    "include_usage": ("once", ""),
    "inference_geo": ("none", _BODY),
    "input": ("prompt", "the model's context"),
    "instructions": ("prompt", "the model's context"),
    "kind": ("once", "GENERATE"),
    "kv_transfer_params": ("once", "see the fields of its own"),
    "max_completion_tokens": ("answer", "the model's context"),
    "max_output_tokens": ("answer", "the model's context"),
    "max_pattern_size": ("token", ""),
    "messages": ("prompt", f"{tables.MAX_MESSAGES:,} messages, the model's context"),
    "metadata": ("none", _BODY),
    "min_count": ("token", ""),
    "min_pattern_size": ("token", ""),
    "model": ("once", ""),
    "previous_response_id": ("prompt", ""),
    "priority": ("once", ""),
    "prompt": ("prompt", f"{MAX_PROMPTS:,} prompts, each the model's context"),
    "prompt_cache_key": ("once", _BODY),
    "prompt_cache_retention": ("none", _BODY),
    "reasoning": ("once", "see the fields of its own"),
    "reasoning_effort": ("once", ""),
    "remote_block_ids": ("bytes", ""),
    "remote_engine_id": ("once", ""),
    "remote_host": ("once", ""),
    "remote_num_tokens": ("once", ""),
    "remote_port": ("once", ""),
    "remote_request_id": ("once", ""),
    "request_id": ("once", ""),
    "resume": ("prompt", "the model's context"),
    "return_timings": ("once", ""),
    "return_token_ids": ("answer", ""),
    "return_token_strs": ("answer", ""),
    "return_tokens_as_token_ids": ("answer", ""),
    "safety_identifier": ("none", _BODY),
    "sampling_params": ("once", "see the fields of its own"),
    "service_tier": ("none", _BODY),
    "stop_sequences": ("sequence", ""),
    "store": ("answer", ""),
    "stream": ("answer", ""),
    "stream_options": ("once", "see the fields of its own"),
    "system": ("prompt", "the model's context"),
    "text": ("once", "see the fields of its own"),
    "timeout_s": ("once", ""),
    "token_ids": ("prompt", "the model's context"),
    "tokens": ("bytes", _BODY),
    "top_logprobs": ("answer", "`--max-logprobs`"),
    "tp_size": ("once", ""),
    "truncation": ("prompt", ""),
    "user": ("once", _BODY),
}
# Fields of the gRPC contract that HTTP calls otherwise, or that one of another meaning is called alike.
RPC_FIELDS: Mapping[str, tuple[str, str]] = {
    "GenerateRequest.text": ("prompt", "the model's context"),
    "GenerateRequest.chat": ("prompt", "see the fields of its own"),
    "GenerateRequest.sampling": ("once", "see the fields of its own"),
    "GenerateRequest.constraint": ("none", "refused"),
    "GenerateRequest.adapter": ("none", "refused"),
    "GenerateRequest.media": ("none", "refused"),
    "GenerateRequest.timeout_ms": ("once", "uint32"),
    "TokenIds.ids": ("prompt", "the model's context"),
    "Chat.messages_json": ("prompt", f"{tables.MAX_MESSAGES:,} messages, depth 100, the model's context"),
    "Chat.tools_json": ("prompt", "depth 100, the model's context"),
    "Chat.template_kwargs_json": ("prompt", "depth 100"),
    "SamplingParams.sample": ("once", "uint32"),
    "SamplingParams.bad_words_ids": ("none", "refused: bad_words is the field"),
    "LogitBiasEntry.key": ("token", "a token of the vocabulary"),
    "LogitBiasEntry.value": ("token", "-100 to 100"),
    "Constraint.kind": ("none", "refused"),
    "Constraint.text": ("none", "refused"),
    "Constraint.digest": ("none", "refused"),
    "MediaBlob.digest": ("none", "refused"),
    "MediaBlob.mime_type": ("none", "refused"),
    "MediaBlob.data": ("none", "refused"),
    "Resume.output_ids": ("prompt", "max_tokens"),
    "Resume.characters": ("once", "uint32"),
}

_PRODUCTS = (
    ("bytes of stop strings and stop_token_ids x sequences", products.MAX_STOP_BYTES),
    ("values of logit_bias, allowed_token_ids and bad_words x sequences", products.MAX_CONTROL_VALUES),
    ("tokens of all prompts x n", products.MAX_PROMPT_TOKENS),
    ("tokens of all prompts x n, where the answer repeats them", products.MAX_TOLD_PROMPT_TOKENS),
    ("alternatives of all prompt tokens x n", products.MAX_PROMPT_ALTERNATIVES),
    (
        f"alternatives of all answer tokens x n; {products.UNSAID_ANSWER_TOKENS:,} tokens without max_tokens",
        products.MAX_ALTERNATIVES,
    ),
)


def http_fields() -> dict[str, list[Field]]:
    """Fields by name, of all tables."""
    found: dict[str, list[Field]] = {}
    for table in vars(tables).values():
        if isinstance(table, Mapping):
            for name, field in table.items():
                if isinstance(field, Field):
                    found.setdefault(name, []).append(field)
    return found


def rpc_fields() -> dict[str, str]:
    """`Message.field` of all that the public contract's requests may contain, with the field's own name."""
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


def bound_of(field: Field) -> str:
    """The bound that a table of fields says."""
    if field.kind == "bool":
        return "a boolean"
    if field.kind == "strings":
        return f"{field.max_items:,} strings of {field.high:,.0f} characters"
    if field.kind == "string":
        return f"{field.max_items:,} characters" if field.max_items else _BODY
    if field.kind in ("ints", "list", "biases"):
        return f"{field.max_items:,} entries"
    if field.kind in ("int", "number") and math.inf in (field.high, -field.low):
        return f"from {field.low:g}"
    if field.kind in ("int", "number"):
        return f"{_number(field.low)} to {_number(field.high)}"
    return ""


def row(name: str) -> tuple[str, str, str]:
    """Field, bound and cost class. Raises KeyError for a field without a class."""
    fields = [field for field in http_fields()[name] if field.supported]
    if not fields:
        return name, "refused unless it changes nothing", "none"
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
        bound = row(name)[1] if name in http_fields() else "a boolean"
    return key, bound, cost


def document() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# What a request may ask for"
    yield ""
    yield "Every field has a bound, and so have the products of fields. A request beyond a bound gets a 4xx (gRPC:"
    yield "`INVALID_ARGUMENT` or `RESOURCE_EXHAUSTED`) that names the field, the cause and the fix."
    yield "`python -m tools.limits_table` writes this page from the tables that requests are checked by."
    yield ""
    yield "| cost class | what it means |"
    yield "|---|---|"
    for name, text in CLASSES.items():
        yield f"| {name} | {text} |"
    yield ""
    yield "## Products"
    yield ""
    yield "Sequences are prompts x n (or best_of)."
    yield ""
    yield "| product | at most |"
    yield "|---|---|"
    for product, most in _PRODUCTS:
        yield f"| {product} | {most:,} |"
    yield ""
    yield "## Connections, calls and bodies"
    yield ""
    yield "| what | bound |"
    yield "|---|---|"
    yield "| HTTP body, gRPC request | `--max-body-bytes` (4 MiB) |"
    yield "| connections to each public port | `--max-connections` (4,096) |"
    yield "| sequences in flight | `--max-concurrent-requests` (1,024) |"
    yield "| gRPC calls at the same time | `--max-concurrent-requests` + 256 |"
    yield "| HTTP head | 64 KiB, 30 s |"
    yield "| HTTP body, gRPC request: time to arrive | 60 s |"
    yield "| a client that takes nothing of its answer | `--client-stall-s` (120 s) |"
    yield "| compressed gRPC messages | refused |"
    yield ""
    yield "## HTTP fields"
    yield ""
    yield "| field | bound | cost class |"
    yield "|---|---|---|"
    for name in sorted(http_fields()):
        yield "| {} | {} | {} |".format(*row(name))
    yield ""
    yield "## gRPC fields of quire.v1.Inference"
    yield ""
    yield "| field | bound | cost class |"
    yield "|---|---|---|"
    for key, name in rpc_fields().items():
        yield "| {} | {} | {} |".format(*rpc_row(key, name))


def _number(value: float) -> str:
    if abs(value) == MAX_INT32:
        return "-2^31 + 1" if value < 0 else "2^31 - 1"
    if value in (-(2**63), 2**64 - 1):
        return "-2^63" if value < 0 else "2^64 - 1"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 2**63 else f"{value:g}"


def main() -> int:
    """Write the page."""
    DOCUMENT.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main())

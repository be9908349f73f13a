"""The fields of /v1/completions and /v1/chat/completions as data. Names are OpenAI's and vLLM's; bounds are Quire's.

Supported fields have an effect, or are accepted as hints without an effect (`user`, `metadata`). For other fields,
`neutral` lists the values that change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.repetition import MAX_PATTERN_COUNT, MAX_PATTERN_SIZE
from quire_common.request_parameters import BY_NAME, PARAMETERS, Parameter
from quire_router.front.parameters.fields import MAX_INT32, Field

if TYPE_CHECKING:
    from collections.abc import Mapping

# The tokenizer's own bounds: a request that it would refuse is refused here, where the status can still be told.
MAX_STOP_STRINGS, MAX_STOP_CHARS = BY_NAME["stop"].max_items, int(BY_NAME["stop"].high)
MAX_STOP_IDS = BY_NAME["stop_token_ids"].max_items
# Each is encoded twice (see requests/encoder.py), and a tokenizer takes 1,024 texts at once.
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = BY_NAME["bad_words"].max_items, int(BY_NAME["bad_words"].high)
MAX_LENGTH_PENALTY = int(BY_NAME["length_penalty"].high)
# Thirty days: whatever a client sends, a deadline is a number that messages between services can carry.
MAX_TIMEOUT_S = 30 * 86_400
MAX_MESSAGES = 10_000
MAX_DOCUMENTS = 1024
MAX_TOOLS = 1024
# The limit of tools over gRPC, which are parsed on the event loop.
MAX_TOOLS_CHARS = 1 << 20
MAX_TEMPLATE_CHARS = 1 << 20
MAX_ID_CHARS = 256
# The tokenizer's bound too.
MAX_CHOICES = 4096
MAX_SOURCE_CHARS = 1 << 20


def _later(*neutral: object) -> Field:
    """Make a field that is known but not supported; `neutral` are the accepted values."""
    return Field("any", supported=False, neutral=neutral)


_HINT = Field("any")


def _field(parameter: Parameter) -> Field:
    """Make the field of a body for one parameter."""
    return Field(
        parameter.kind, parameter.default, low=parameter.low, high=parameter.high, max_items=parameter.max_items
    )


SAMPLING: Mapping[str, Field] = {
    # Each route has a `logprobs` of its own.
    **{each.name: _field(each) for each in PARAMETERS if each.name != "logprobs"},
    "model": Field("string", "", max_items=MAX_ID_CHARS),
    # Ours: seconds from arrival.
    "timeout_s": Field("number", low=0, high=MAX_TIMEOUT_S),
    "stream": Field("bool", False),
    "stream_options": Field("object"),
    "priority": Field("int", 0, low=-MAX_INT32, high=MAX_INT32),
    "request_id": Field("string", max_items=MAX_ID_CHARS),
    "return_token_ids": Field("bool", False),
    "return_tokens_as_token_ids": Field("bool", False),
    "cache_salt": Field("string", "", max_items=MAX_ID_CHARS),
    # The constraint that the answer must match.
    "response_format": Field("object"),
    "structured_outputs": Field("object"),
    # vLLM's older names.
    "guided_json": Field("any"),
    "guided_regex": Field("string", max_items=MAX_SOURCE_CHARS),
    "guided_choice": Field("list", max_items=MAX_CHOICES),
    "guided_grammar": Field("string", max_items=MAX_SOURCE_CHARS),
    "guided_whitespace_pattern": Field("string", max_items=MAX_SOURCE_CHARS),
    # Hints without an effect here.
    "user": _HINT,
    "metadata": _HINT,
    "store": _HINT,
    "service_tier": _HINT,
    "safety_identifier": _HINT,
    "prompt_cache_key": _HINT,
    "prompt_cache_retention": _HINT,
    # Known, not yet supported.
    "kv_transfer_params": Field("object"),
    "vllm_xargs": _later({}),
}


def _taken_by(route: str) -> dict[str, Field]:
    """Return, by name, the fields of the sampling parameters whose `also_in` has the route. They are in addition to
    those of completions, chat and generate."""
    return {each.name: SAMPLING[each.name] for each in PARAMETERS if route in each.also_in}


COMPLETION: Mapping[str, Field] = {
    **SAMPLING,
    "prompt": Field("any"),
    # 0: the prompt alone, for echo and its logprobs.
    "max_tokens": Field("int", low=0, high=MAX_INT32),
    "echo": Field("bool", False),
    "logprobs": _field(BY_NAME["logprobs"]),
    "add_special_tokens": Field("bool", True),
    "best_of": Field("int", low=1, high=MAX_INT32),
    "suffix": _later(""),
    "prompt_embeds": _later(),
}

CHAT: Mapping[str, Field] = {
    **SAMPLING,
    "messages": Field("list", max_items=MAX_MESSAGES),
    "max_completion_tokens": Field("int", low=1, high=MAX_INT32),
    "logprobs": Field("bool", False),
    "top_logprobs": Field("int", low=0, high=MAX_INT32),
    "add_generation_prompt": Field("bool", True),
    "continue_final_message": Field("bool", False),
    "chat_template_kwargs": Field("object"),
    # For the template.
    "documents": Field("list", max_items=MAX_DOCUMENTS),
    "reasoning_effort": Field("string", max_items=MAX_ID_CHARS),
    # Taken where the tokenizers were started with --allow-request-chat-template.
    "chat_template": Field("string", max_items=MAX_TEMPLATE_CHARS),
    "tools": Field("list", max_items=MAX_TOOLS),
    "tool_choice": Field("any"),
    "parallel_tool_calls": Field("bool", True),
    "functions": _later([]),
    "function_call": _later("none", "auto"),
    "echo": _later(False),
    # A rendered template has its special tokens already.
    "add_special_tokens": _later(False),
    "mm_processor_kwargs": _later(),
    "modalities": _later(["text"]),
    "audio": _later(),
    "prediction": _later(),
    "include_reasoning": Field("bool", True),
    "verbosity": _later("medium"),
    "web_search_options": _later(),
}

# Of /inference/v1/generate: the object `sampling_params`, with vLLM's names, and what is around it.
SAMPLING_PARAMS: Mapping[str, Field] = {
    name: field
    for name, field in SAMPLING.items()
    if name
    not in (
        "model",
        "stream",
        "stream_options",
        "request_id",
        "priority",
        "cache_salt",
        "return_token_ids",
        "kv_transfer_params",
    )
} | {
    "logprobs": _field(BY_NAME["logprobs"]),
    "detokenize": _HINT,
    "extra_args": Field("object"),
    "output_kind": _later(),
    "best_of": _later(1),
}

GENERATE: Mapping[str, Field] = {
    "model": SAMPLING["model"],
    "token_ids": Field("any"),
    "sampling_params": Field("object"),
    "stream": Field("bool", False),
    "stream_options": Field("object"),
    "request_id": SAMPLING["request_id"],
    "priority": SAMPLING["priority"],
    "cache_salt": SAMPLING["cache_salt"],
    "features": _later(),
    "kv_transfer_params": SAMPLING["kv_transfer_params"],
}
# Where llm-d has it.
EXTRA_ARGS: Mapping[str, Field] = {"kv_transfer_params": SAMPLING["kv_transfer_params"]}

KV_TRANSFER: Mapping[str, Field] = {
    "do_remote_decode": Field("bool", False),
    "do_remote_prefill": Field("bool", False),
    "remote_engine_id": Field("string", max_items=MAX_ID_CHARS),
    "remote_request_id": Field("string", max_items=MAX_ID_CHARS),
    "remote_host": Field("string", max_items=MAX_ID_CHARS),
    "remote_port": Field("int", low=0, high=65535),
    # What the ticket says itself.
    "remote_block_ids": Field("list", max_items=1 << 20),
    "remote_num_tokens": Field("int", low=0, high=MAX_INT32),
    "tp_size": Field("int", low=1, high=MAX_INT32),
}

TOKENIZE: Mapping[str, Field] = {
    "model": SAMPLING["model"],
    "prompt": Field("string"),
    "add_special_tokens": Field("bool", True),
    "return_token_strs": Field("bool", False),
}

TOKENIZE_CHAT: Mapping[str, Field] = {
    "model": SAMPLING["model"],
    "return_token_strs": Field("bool", False),
    **{
        name: CHAT[name]
        for name in (
            "messages",
            "add_generation_prompt",
            "continue_final_message",
            "add_special_tokens",
            "chat_template",
            "chat_template_kwargs",
            "mm_processor_kwargs",
            "tools",
        )
    },
}

DETOKENIZE: Mapping[str, Field] = {"model": SAMPLING["model"], "tokens": Field("any")}

# Anthropic's. What it shares with the others has their names in a job.
COUNT_TOKENS: Mapping[str, Field] = {
    "model": SAMPLING["model"],
    "messages": CHAT["messages"],
    "system": Field("any"),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "tools": CHAT["tools"],
    "tool_choice": Field("object"),
    "thinking": Field("object"),
    "output_config": Field("object"),
    "output_format": Field("object"),
    "mcp_servers": _later([]),
    "context_management": _later({}),
}

MESSAGES: Mapping[str, Field] = {
    **COUNT_TOKENS,
    "max_tokens": Field("int", low=1, high=MAX_INT32),
    "stop_sequences": SAMPLING["stop"],
    "stream": SAMPLING["stream"],
    **_taken_by("messages"),
    "metadata": _HINT,
    "service_tier": _HINT,
    "inference_geo": _HINT,
    "container": _later(),
}

# The member `thinking` of messages.
THINKING: Mapping[str, Field] = {
    "type": Field("string", max_items=MAX_ID_CHARS),
    "budget_tokens": Field("int", low=1, high=MAX_INT32),
    # Reasoning comes as the model wrote it; Anthropic's other value leaves its text out.
    "display": _later("summarized"),
}

# OpenAI's Responses API.
RESPONSES: Mapping[str, Field] = {
    **_taken_by("responses"),
    **{
        name: SAMPLING[name]
        for name in (
            "model",
            "priority",
            "request_id",
            "cache_salt",
            "stream",
            "timeout_s",
            "service_tier",
            "prompt_cache_retention",
        )
    },
    # The answer repeats these, several times in a stream, and the store keeps them. OpenAI's rules.
    "metadata": Field("texts", high=512, max_items=16),
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), Field("string", max_items=MAX_ID_CHARS)),
    "input": Field("any"),
    "instructions": Field("string"),
    "max_output_tokens": Field("int", low=1, high=MAX_INT32),
    "previous_response_id": Field("string", max_items=MAX_ID_CHARS),
    "store": Field("bool"),
    "background": Field("bool", False),
    "include": Field("strings", (), high=MAX_ID_CHARS, max_items=16),
    "top_logprobs": Field("int", low=0, high=MAX_INT32),
    "text": Field("object"),
    "truncation": Field("string", "disabled"),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "stream_options": _later({}, {"include_obfuscation": False}),
    "tools": CHAT["tools"],
    "tool_choice": CHAT["tool_choice"],
    "parallel_tool_calls": CHAT["parallel_tool_calls"],
    "max_tool_calls": _later(),
    "reasoning": Field("object"),
    "conversation": _later(),
    "prompt": _later(),
}

RESPONSE_REASONING: Mapping[str, Field] = {
    "effort": CHAT["reasoning_effort"],
    "summary": _later("auto"),
    "generate_summary": _later("auto"),
}

RESPONSE_TEXT: Mapping[str, Field] = {"format": Field("object"), "verbosity": _later("medium")}

STRUCTURED_OUTPUTS: Mapping[str, Field] = {
    "json": Field("any"),
    "regex": Field("string", max_items=MAX_SOURCE_CHARS),
    "choice": Field("list", max_items=MAX_CHOICES),
    "grammar": Field("string", max_items=MAX_SOURCE_CHARS),
    "json_object": Field("bool"),
    "structural_tag": Field("any"),
    "disable_fallback": _HINT,
    "disable_any_whitespace": Field("bool", False),
    "disable_additional_properties": Field("bool", False),
    "whitespace_pattern": Field("string", max_items=MAX_SOURCE_CHARS),
    # Ours, so that a request which was rendered means the same.
    "strict": Field("bool", False),
    "prompt_end": Field("string", "", max_items=MAX_ID_CHARS),
}

RESPONSE_FORMAT: Mapping[str, Field] = {
    "type": Field("string", max_items=MAX_ID_CHARS),
    "json_schema": Field("object"),
    # The fields of structural tags.
    "format": Field("object"),
    "structures": Field("list", max_items=MAX_CHOICES),
    "triggers": Field("list", max_items=MAX_CHOICES),
}

JSON_SCHEMA: Mapping[str, Field] = {
    "name": Field("string", max_items=MAX_ID_CHARS),
    "description": Field("string", max_items=MAX_SOURCE_CHARS),
    "schema": Field("any"),
    "strict": Field("bool", False),
}

# Anthropic's, and of the Responses API.
OUTPUT_FORMAT: Mapping[str, Field] = {"type": RESPONSE_FORMAT["type"], **JSON_SCHEMA}
OUTPUT_CONFIG: Mapping[str, Field] = {"format": Field("object"), "effort": _later()}

STREAM_OPTIONS: Mapping[str, Field] = {
    "include_usage": Field("bool", False),
    "continuous_usage_stats": Field("bool", False),
    "include_obfuscation": _later(False),
}

REPETITION: Mapping[str, Field] = {
    "max_pattern_size": Field("int", 0, low=0, high=MAX_PATTERN_SIZE),
    "min_pattern_size": Field("int", 0, low=0, high=MAX_PATTERN_SIZE),
    "min_count": Field("int", 0, low=0, high=MAX_PATTERN_COUNT),
}

"""Schemas of answers in OpenAI's and vLLM's forms, and of the router's answers about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_router.front.http.openapi.schemas import (
    ANY,
    BOOLEAN,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    STRING,
    array,
    closed,
    const,
    either,
    maybe,
    one_of,
    ref,
)
from quire_router.sequences.delta import FINISH_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_router.front.http.openapi.schemas import Schema

_FINISH = maybe(one_of(*FINISH_NAMES.values()))
_STOP_REASON = either(STRING, INTEGER, NULL)
_IDS = array(INTEGER)
_CHUNK_USAGE = {"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER}
_PROMPT_LOGPROBS = array(maybe({"type": "object", "additionalProperties": ref("PromptLogprob")}))
_HEAD = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": maybe(STRING)}
_KV_TRANSFER = maybe(ref("KvTransferParams"))
_TIMINGS = {"quire_timings": array(ref("HopTiming")), "quire_runs": array(ref("Run"))}
_CHAT_REST = {
    "logprobs": maybe(ref("ChatLogprobs")),
    "finish_reason": maybe(one_of(*FINISH_NAMES.values(), "tool_calls")),
}
_REASONING = {"reasoning": STRING, "reasoning_content": STRING}
_CHAT_DELTA = {"role": STRING, "content": STRING, **_REASONING, "tool_calls": array(ref("ToolCallDelta"))}
_CHAT_EXTRA = {"stop_reason": _STOP_REASON, "token_ids": _IDS}
_COMPLETION_CHOICE = closed(
    {
        "index": INTEGER,
        "text": STRING,
        "logprobs": maybe(ref("CompletionLogprobs")),
        "finish_reason": _FINISH,
        "stop_reason": _STOP_REASON,
    },
    {"prompt_logprobs": _PROMPT_LOGPROBS, "token_ids": _IDS, "prompt_token_ids": _IDS},
)
_CHAT_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": _IDS}
_TOKEN_CHOICE = closed(
    {"index": INTEGER, "token_ids": _IDS, "logprobs": maybe(ref("ChatLogprobs")), "finish_reason": _FINISH}
)
_SOME_USAGE = {"usage": maybe(either(ref("Usage"), closed(_CHUNK_USAGE)))}

ANSWERS: Mapping[str, Schema] = {
    "Error": closed(
        {"error": closed({"message": STRING, "type": STRING, "param": maybe(STRING), "code": STRING})},
    ),
    "Usage": closed(
        {**_CHUNK_USAGE, "prompt_tokens_details": closed({"cached_tokens": INTEGER})},
        {"completion_tokens_details": closed({"reasoning_tokens": INTEGER})},
    ),
    "ToolCall": closed(
        {"id": STRING, "type": const("function"), "function": closed({"name": STRING, "arguments": STRING})}
    ),
    "ToolCallDelta": closed(
        {"index": INTEGER, "function": closed({"arguments": STRING}, {"name": STRING})},
        {"id": STRING, "type": const("function")},
    ),
    "HopTiming": closed({"service": STRING, "phase": STRING, "us": INTEGER, "count": INTEGER, "instance": STRING}),
    "Run": closed({"index": INTEGER, "instance": STRING, "from_token": INTEGER}),
    "PromptLogprob": closed({"logprob": NUMBER, "rank": INTEGER, "decoded_token": STRING}),
    "CompletionLogprobs": closed(
        {
            "text_offset": _IDS,
            "token_logprobs": array(maybe(NUMBER)),
            "tokens": array(STRING),
            "top_logprobs": array(maybe({"type": "object", "additionalProperties": NUMBER})),
        }
    ),
    "ChatLogprobs": closed({"content": array(ref("ChatLogprob"))}),
    "ChatLogprob": closed({**_CHAT_TOKEN, "top_logprobs": array(closed(_CHAT_TOKEN))}),
    "Completion": closed(
        {**_HEAD, "object": const("text_completion"), "choices": array(_COMPLETION_CHOICE), "usage": ref("Usage")},
        {"kv_transfer_params": _KV_TRANSFER, **_TIMINGS},
    ),
    "CompletionChunk": closed(
        {**_HEAD, "object": const("text_completion"), "choices": array(_COMPLETION_CHOICE)},
        {**_SOME_USAGE, **_TIMINGS},
    ),
    "ChatCompletion": closed(
        {
            **_HEAD,
            "object": const("chat.completion"),
            "choices": array(
                closed(
                    {
                        "index": INTEGER,
                        "message": closed(
                            {"role": const("assistant"), "content": maybe(STRING), "refusal": NULL},
                            {**_REASONING, "tool_calls": array(ref("ToolCall"))},
                        ),
                        **_CHAT_REST,
                        "stop_reason": _STOP_REASON,
                    },
                    {"token_ids": _IDS},
                )
            ),
            "usage": ref("Usage"),
        },
        {
            "prompt_logprobs": _PROMPT_LOGPROBS,
            "prompt_token_ids": _IDS,
            "kv_transfer_params": _KV_TRANSFER,
            **_TIMINGS,
        },
    ),
    "ChatCompletionChunk": closed(
        {
            **_HEAD,
            "object": const("chat.completion.chunk"),
            "choices": array(
                closed(
                    {"index": INTEGER, "delta": closed({}, _CHAT_DELTA), **_CHAT_REST},
                    _CHAT_EXTRA,
                )
            ),
        },
        {**_SOME_USAGE, "prompt_token_ids": _IDS, **_TIMINGS},
    ),
    "TokenAnswer": closed(
        {
            "request_id": STRING,
            "choices": array(_TOKEN_CHOICE),
            "prompt_logprobs": maybe(_PROMPT_LOGPROBS),
            "kv_transfer_params": _KV_TRANSFER,
            "usage": ref("Usage"),
        }
    ),
    "TokenChunk": closed({"request_id": STRING, "choices": array(_TOKEN_CHOICE)}, {"usage": ref("Usage")}),
    "RenderedRequest": closed(
        {
            "request_id": STRING,
            "token_ids": _IDS,
            "sampling_params": ref("SamplingParams"),
            "model": STRING,
            "features": NULL,
            "stream": BOOLEAN,
            "stream_options": maybe(OBJECT),
            "cache_salt": maybe(STRING),
            "priority": INTEGER,
            "kv_transfer_params": maybe(OBJECT),
        }
    ),
    "RenderedRequests": array(ref("RenderedRequest")),
    "Tokens": closed({"count": INTEGER, "max_model_len": INTEGER, "tokens": _IDS, "token_strs": maybe(array(STRING))}),
    "Detokenized": closed({"prompt": STRING}),
    "Model": closed(
        {
            "id": STRING,
            "object": const("model"),
            "created": INTEGER,
            "owned_by": STRING,
            "root": STRING,
            "parent": NULL,
            "max_model_len": INTEGER,
            "vocab_size": INTEGER,
            "permission": array(ANY),
        }
    ),
    "Models": closed({"object": const("list"), "data": array(ref("Model"))}),
    "Version": closed({"version": STRING}),
    "Live": closed({"live": BOOLEAN}),
    "ConsoleDone": closed({"state": one_of("done", "under way")}),
    "Load": closed(
        {
            "server_load": INTEGER,
            "schedulers": array(
                closed(
                    {
                        "instance": STRING,
                        "role": STRING,
                        "in_flight": INTEGER,
                        "running": INTEGER,
                        "waiting": INTEGER,
                        "max_num_seqs": INTEGER,
                        "open_transfers": INTEGER,
                    }
                )
            ),
        }
    ),
    "Ready": closed(
        {
            "ready": BOOLEAN,
            "router": closed({"phase": STRING}),
            "schedulers": array(
                closed(
                    {"phase": STRING, "progress": NUMBER},
                    {
                        "instance": STRING,
                        "role": STRING,
                        "detail": STRING,
                        "session": STRING,
                        "model": maybe(STRING),
                        "running": INTEGER,
                        "waiting": INTEGER,
                    },
                )
            ),
            "tokenizers": array(closed({"phase": STRING}, {"instance": STRING})),
        }
    ),
}
